"""Graphs of other shapes take a plan's order, and exactly its order of collectives."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lancet_programs import backward, programs

from lancet.graph.operations import Op, OpGraph
from lancet.planner.other_shapes import follow_plan
from lancet.planner.plan import Sums, make_plan


def plan_of(ops):
    return make_plan("backward 1", "digest", "torch", ops, [], None)


@pytest.mark.unchecked
@given(programs())
def test_the_same_operations_take_the_same_order(ops):
    plan = plan_of(ops)
    assert follow_plan(plan, ops, {}) == plan.launches


@pytest.mark.unchecked
@given(programs(), st.data())
def test_operations_of_sizes_leave_the_order_of_collectives(ops, data):
    plan = plan_of(ops)
    other, sizes = [], []
    for op in ops:
        if data.draw(st.booleans()):
            after = tuple(data.draw(st.lists(st.sampled_from(sizes), max_size=2))) if sizes else ()
            sizes.append(f"size of {op.name}")
            other.append(Op(sizes[-1], "compute", 0.0, after))
            op = replace(op, after=(*op.after, sizes[-1]))
        other.append(op)
    launches = follow_plan(plan, other, {})
    assert launches is not None
    order = launches.names
    by_name = {op.name: op for op in other}
    OpGraph([by_name[name] for name in order])  # refuses what comes before what it follows
    assert sorted(order) == sorted(by_name)
    collectives = [op.name for op in ops if op.kind != "compute"]
    assert [n for n in order if n in collectives] == [n for n in plan.order if n in collectives]


def test_names_of_collectives_may_differ():
    ops = backward(2, weight_s=2.0)
    plan = plan_of(ops)
    names = {op.name: f"{op.name} anew" for op in ops if op.kind != "compute"}
    other = [
        replace(
            op, name=names.get(op.name, op.name), after=tuple(names.get(n, n) for n in op.after)
        )
        for op in ops
    ]
    assert plan.order != tuple(op.name for op in ops)
    launches = follow_plan(plan, other, {})
    assert launches is not None
    assert launches.names == tuple(names.get(name, name) for name in plan.order)


def test_graphs_with_other_collectives_do_not_follow():
    plan = plan_of(backward(2))
    assert follow_plan(plan, backward(1), {}) is None
    as_sums = [
        replace(op, kind="all_reduce") if op.kind == "all_to_all" else op for op in backward(2)
    ]
    assert follow_plan(plan, as_sums, {}) is None


def test_a_graph_whose_exchange_waits_for_a_later_sum_does_not_follow():
    ops = [
        Op("dw", "compute", 1.0),
        Op("sum", "all_reduce", 1.0, ("dw",)),
        Op("rows", "all_to_all", 1.0),
        Op("dx", "compute", 1.0, ("rows",)),
    ]
    plan = plan_of(ops)
    assert plan.order.index("rows") < plan.order.index("sum")
    waiting = [replace(op, after=("sum",)) if op.name == "rows" else op for op in ops]
    assert follow_plan(plan, waiting, {}) is None


def test_groups_follow_under_other_names_before_all_averages():
    ops = [Op("start", "compute", 1.0)]
    for number in range(3):
        ops += [
            Op(f"dw{number}", "compute", 1.0, ("start",)),
            Op(f"sum{number}", "all_reduce", 2.0, (f"dw{number}",)),
            Op(f"mean{number}", "compute", 0.1, (f"sum{number}",)),
        ]
    sums = Sums(latency_s=1.9, dtypes={f"sum{number}": "float32" for number in range(3)})
    plan = make_plan("backward 1", "digest", "torch", ops, [], None, sums)
    assert plan.groups == (("sum1", "sum2"),)
    # A size that only the other graph has reads an average, and is captured right after a sum.
    other = [
        replace(
            op,
            name=op.name.replace("sum", "total"),
            after=tuple(name.replace("sum", "total") for name in op.after),
        )
        for op in ops
    ]
    other.insert(8, Op("size", "compute", 0.0, ("mean1",)))
    assert [op.name for op in other[7:10]] == ["dw2", "size", "total2"]
    dtypes = {f"total{number}": "float32" for number in range(3)}
    launches = follow_plan(plan, other, dtypes)
    assert launches is not None
    assert launches.groups == (("total1", "total2"),)
    for name in ("mean1", "mean2", "size"):
        assert launches.names.index(name) > launches.names.index("total2")
    # The first one's sum is in no group.
    for changed in ({"total0": "bfloat16"}, {"total1": "bfloat16", "total2": "bfloat16"}):
        assert follow_plan(plan, other, dtypes | changed) == launches
    assert follow_plan(plan, other, dtypes | {"total2": "bfloat16"}) is None
    del dtypes["total1"]
    assert follow_plan(plan, other, dtypes) is None
