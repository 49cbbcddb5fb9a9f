"""Plans with groups: replayed as one all-reduce each, of one dtype, within the memory of each rank."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lancet.graph.operations import LaunchOrder, Op, OpGraph
from lancet.planner.groups import contract_groups, expand_groups, fuse_tensors
from lancet.planner.memory import KeptTensor, LiveBytes
from lancet.planner.plan import Plan, Sums, load_plans, make_plan, replan, save_plans
from lancet.simulator import simulate
from shared.errors import DataError


def gradients(num, compute_s=1.0, sum_s=2.0):
    """A backward pass without exchanges: a gradient, its sum and its average at a time."""
    ops = []
    for k in range(num):
        ops += [
            Op(f"dw{k}", "compute", compute_s),
            Op(f"sum{k}", "all_reduce", sum_s, (f"dw{k}",)),
            Op(f"mean{k}", "compute", 0.0, (f"sum{k}",)),
        ]
    return ops


def tensors(num, num_bytes=100):
    """Gradients, their sums and averages; averages are kept."""
    kept = []
    for k in range(num):
        kept += [
            KeptTensor(num_bytes=num_bytes, maker=f"dw{k}", readers=(f"sum{k}",)),
            KeptTensor(num_bytes=num_bytes, maker=f"sum{k}", readers=(f"mean{k}",)),
            KeptTensor(num_bytes=num_bytes, maker=f"mean{k}", is_kept=True),
        ]
    return kept


def plan_of(ops, kept=(), memory_bytes=None, latency_s=1.9, dtypes=None, num_ranks=2):
    sums = [op.name for op in ops if op.kind == "all_reduce"]
    dtypes = dict.fromkeys(sums, "float32") if dtypes is None else dtypes
    described = Sums(latency_s=latency_s, dtypes=dtypes, num_ranks=num_ranks)
    return make_plan("backward 1", "digest", "torch", ops, kept, memory_bytes, described)


def test_groups_replay_as_one_all_reduce():
    plan = plan_of(gradients(3))
    # One by one, 7 s. The best: one sum from 1 to 3 s, then both others', for 2.1 s.
    assert plan.makespan_s == pytest.approx(5.1)
    assert plan.groups == (("sum1", "sum2"),)
    assert simulate(plan.fused_ops).makespan_s == pytest.approx(plan.makespan_s)
    sums = [op.name for op in plan.fused_ops if op.kind == "all_reduce"]
    assert sums == ["sum0", "sum1 and 1 more"]
    assert plan_of(gradients(4), latency_s=0.0).groups == ()
    assert plan_of(gradients(4), dtypes={}).groups == ()


@pytest.mark.unchecked
@given(st.lists(st.sampled_from(["float32", "bfloat16", None]), min_size=2, max_size=8))
def test_a_group_has_one_dtype(dtypes):
    named = {f"sum{k}": dtype for k, dtype in enumerate(dtypes) if dtype}
    plan = plan_of(gradients(len(dtypes), compute_s=0.1), dtypes=named)
    for group in plan.groups:
        assert len(group) > 1
        assert len({named[name] for name in group}) == 1
    OpGraph(plan.fused_ops)


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("memory_bytes", [0, 150, 250, 350, 10_000])
def test_groups_keep_within_the_memory(memory_bytes, num_ranks):
    ops, kept = gradients(6, compute_s=0.1), tensors(6)
    plan = plan_of(ops, [kept, kept], memory_bytes, num_ranks=num_ranks)
    before = LiveBytes(OpGraph(ops), kept).peak_bytes(range(len(ops)))
    fused = fuse_tensors(kept, ops, plan.launches, num_ranks)
    graph = OpGraph(plan.fused_ops)
    assert LiveBytes(graph, fused).peak_bytes(range(len(graph.ops))) <= before + memory_bytes
    if memory_bytes == 10_000:
        assert len(plan.groups[0]) > 2


def test_bytes_of_a_group_by_hand():
    ops, kept = gradients(3), tensors(3)
    names = ("dw0", "dw1", "dw2", "sum0", "sum1", "sum2", "mean0", "mean1", "mean2")
    launches = LaunchOrder(names, (("sum0", "sum1", "sum2"),))
    graph = OpGraph(contract_groups(ops, launches, 0.0))
    fused = fuse_tensors(kept, ops, launches, 2)
    means = ("mean0", "mean1", "mean2")
    assert fused[-1] == KeptTensor(
        num_bytes=300, maker="dw0", readers=("sum0 and 2 more", *means), is_kept=True
    )
    on_two = LiveBytes(graph, fused)
    # A buffer of 300 bytes from the first gradient on, which is freed as it is packed.
    assert on_two.list_bytes(range(7)).tolist() == [400, 400, 400, 300, 300, 300, 300]
    on_three = LiveBytes(graph, fuse_tensors(kept, ops, launches, 3))
    # Averages are copies there, and a gradient may be padded by 3 elements of 8 bytes.
    assert on_three.list_bytes(range(7)).tolist() == [472, 472, 472, 372, 472, 572, 672]


def test_a_group_goes_between_all_to_alls_where_not_all_single_sums_do():
    ops = [
        *gradients(2, compute_s=0.1),
        Op("dx", "compute", 0.1),
        Op("rows", "all_to_all", 2.0, ("dx",)),
        Op("experts", "compute", 2.5, ("rows",)),
        Op("back", "all_to_all", 2.0, ("experts",)),
        Op("last", "compute", 1.0, ("back",)),
    ]
    # Exchanges from 0.1 to 2.1 and from 4.6 to 6.6 s, beside the first one both gradients: the network
    # is idle for 2.5 s, which is enough for one sum or for the group, and not for two sums.
    plan = plan_of(ops, latency_s=2.0)
    assert plan.makespan_s == pytest.approx(7.6)
    sent = [op.name for op in plan.fused_ops if op.kind != "compute"]
    assert sent == ["rows", "sum0 and 1 more", "back"]


def test_averages_wait_where_sums_keep_their_turn():
    ops = [
        *gradients(1, sum_s=3.5),
        Op("dx", "compute", 3.0),
        Op("rows", "all_to_all", 3.0, ("dx",)),
        Op("last", "compute", 1.0, ("rows",)),
    ]
    # The sum ends at 4.5 s, and delays the rows by half a second: behind them it would end at 10.5 s.
    assert plan_of(ops).makespan_s == pytest.approx(8.5)


def test_a_group_takes_the_turn_of_its_last_sum():
    ops = gradients(2)
    launches = LaunchOrder(("dw0", "sum0", "dw1", "sum1", "mean0", "mean1"), (("sum0", "sum1"),))
    contracted = contract_groups(ops, launches, 1.0)
    assert [op.name for op in contracted] == ["dw0", "dw1", "sum0 and 1 more", "mean0", "mean1"]
    assert contracted[2] == Op("sum0 and 1 more", "all_reduce", 3.0, ("dw0", "dw1"))


def test_a_buffer_begins_with_what_its_first_sum_follows_last():
    ops = [
        Op("early", "compute", 1.0),
        Op("dw0", "compute", 1.0),
        Op("dw1", "compute", 1.0),
        Op("sum0", "all_reduce", 1.0, ("early", "dw0")),
        Op("sum1", "all_reduce", 1.0, ("early", "dw1")),
    ]
    launches = LaunchOrder(tuple(op.name for op in ops), (("sum0", "sum1"),))
    assert fuse_tensors([], ops, launches, 2)[-1].maker == "dw0"


def test_a_group_may_add_up_averages_of_another():
    ops = [
        *gradients(2),
        Op("total0", "all_reduce", 1.0, ("mean0",)),
        Op("total1", "all_reduce", 1.0, ("mean1",)),
    ]
    kept = [replace(t, readers=(f"total{t.maker[-1]}",)) if t.is_kept else t for t in tensors(2)]
    names = ("dw0", "dw1", "sum0", "sum1", "mean0", "mean1", "total0", "total1")
    launches = LaunchOrder(names, (("sum0", "sum1"), ("total0", "total1")))
    buffers = fuse_tensors(kept, ops, launches, 2)[-2:]
    assert {*buffers[0].readers[1:]} == {"mean0", "mean1", "total0 and 1 more"}
    assert buffers[1].maker == "mean0"


def test_an_order_with_groups_is_expanded_again():
    launches = LaunchOrder(("a", "x", "y", "b"), (("x", "y"),))
    assert expand_groups(["a", "x and 1 more", "b"], launches.groups) == launches


def test_groups_are_written_and_read(tmp_path):
    plan = plan_of(gradients(4))
    save_plans(tmp_path / "plan.json", [plan])
    assert load_plans(tmp_path / "plan.json") == [plan]
    assert replan(plan, 2.0).sums.latency_s == plan.sums.latency_s / 2


def test_a_plan_of_format_1_has_no_groups():
    plan = replace(plan_of(gradients(4)), groups=())
    values = json.loads(plan.to_json()) | {"format": 1}
    del values["groups"], values["sums"]
    assert Plan.from_json(json.dumps(values)) == replace(plan, sums=Sums())


@pytest.mark.parametrize(
    "groups",
    [
        (("sum0",),),
        (("sum0", "sum2"),),
        (("dw0", "sum0"),),
        ((),),
        (("sum2", "sum1"),),
        (("sum1", "sum2"), ("sum2", "sum3")),
    ],
)
def test_a_file_of_other_groups_is_refused(tmp_path, groups):
    plan = replace(plan_of(gradients(4)), groups=groups)
    save_plans(tmp_path / "plan.json", [plan])
    with pytest.raises(DataError, match="expected groups of two or more all-reduces of one dtype"):
        load_plans(tmp_path / "plan.json")
