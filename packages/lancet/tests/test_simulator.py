import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lancet.graph.operations import Op, OpGraph
from lancet.simulator import compute_ends, simulate
from shared.errors import DataError

KINDS = st.sampled_from(["compute", "all_to_all", "all_reduce"])


@st.composite
def programs(draw):
    ops = []
    for number in range(draw(st.integers(0, 12))):
        names = [op.name for op in ops]
        after = draw(st.lists(st.sampled_from(names), max_size=3)) if names else []
        ops.append(Op(f"op{number}", draw(KINDS), draw(st.floats(0, 9)), tuple(after)))
    return ops


def test_queues_overlap_and_waits_are_named_by_hand():
    # compute   | a 2 | weight 1 |  wait 2  | b 1 |
    # network   |     |      x 3            |     | r 4 |
    timeline = simulate(
        [
            Op("a", "compute", 2.0),
            Op("x", "all_to_all", 3.0, ("a",)),
            Op("weight", "compute", 1.0, ("a",)),
            Op("b", "compute", 1.0, ("x",)),
            Op("r", "all_reduce", 4.0, ("b",)),
        ]
    )
    assert timeline.makespan_s == 10.0
    assert timeline.exposed_s == 6.0
    assert [(w.start_s, w.end_s, w.communication) for w in timeline.waits] == [
        (3.0, 5.0, "x"),
        (6.0, 10.0, "r"),
    ]
    assert timeline.exposed_s_by_op == {"x": 2.0, "r": 4.0}
    assert timeline.timeline.span_s("weight") == (2.0, 3.0)


def test_wait_is_shared_out_over_the_communications_that_run_in_it():
    timeline = simulate(
        [
            Op("a", "compute", 1.0),
            Op("r", "all_reduce", 5.0, ("a",)),
            Op("x", "all_to_all", 2.0, ("a",)),
            Op("b", "compute", 1.0, ("x",)),
        ]
    )
    assert [wait.communication for wait in timeline.waits] == ["x"]
    assert timeline.exposed_s_by_op == {"r": 5.0, "x": 2.0}


@given(programs())
def test_starts_are_the_least_that_queues_and_dependencies_allow(ops):
    timeline = simulate(ops)
    starts = {op.name: timeline.timeline.span_s(op.name)[0] for op in ops}
    ends = {op.name: timeline.timeline.span_s(op.name)[1] for op in ops}
    for number, op in enumerate(ops):
        is_compute = op.kind == "compute"
        ahead = [other.name for other in ops[:number] if (other.kind == "compute") == is_compute]
        # Not only no earlier than allowed: equal to the latest of its causes.
        assert starts[op.name] == max([0.0, *(ends[name] for name in (*ahead[-1:], *op.after))])
        assert ends[op.name] == starts[op.name] + op.time_s
    assert timeline.makespan_s == max(ends.values(), default=0.0)


@given(programs())
def test_exposed_seconds_are_those_of_the_communications_in_waits(ops):
    timeline = simulate(ops)
    compute_s = sum(op.time_s for op in ops if op.kind == "compute")
    assert timeline.exposed_s == pytest.approx(timeline.makespan_s - compute_s, abs=1e-9)
    assert sum(timeline.exposed_s_by_op.values()) == pytest.approx(timeline.exposed_s, abs=1e-9)
    for wait in timeline.waits:
        assert timeline.timeline.span_s(wait.communication)[1] == wait.end_s


@given(programs(), st.randoms(use_true_random=False))
def test_ends_of_another_order_equal_its_replay(ops, shuffle):
    graph, order = OpGraph(ops), []
    rest = list(range(len(ops)))
    while rest:
        ready = [i for i in rest if set(graph.needs[i]) <= set(order)]
        order.append(shuffle.choice(ready))
        rest.remove(order[-1])
    timeline = simulate([ops[i] for i in order])
    expected = [timeline.timeline.span_s(op.name)[1] for op in ops]
    assert compute_ends(graph, order) == expected


def test_order_of_the_queues_is_that_of_the_list():
    ops = [Op(name, "compute", 1.0) for name in "abc"]
    random.Random(0).shuffle(ops)
    timeline = simulate(ops).timeline
    assert [timeline.span_s(op.name) for op in ops] == [(0.0, 1.0), (1.0, 2.0), (2.0, 3.0)]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Op("a", "matmul", 1.0), "operation 'a': expected a kind of compute, all_to_all"),
        (lambda: Op("a", "compute", -1.0), "operation 'a': expected a finite time .* got -1.0 s"),
        (lambda: Op("a", "compute", float("nan")), "operation 'a': .* got nan s"),
        (lambda: Op("a", "compute", float("inf")), "operation 'a': .* got inf s"),
        (lambda: Op("b", "compute", 1.0, "a"), r"operation 'b': .* write \('a',\)"),
    ],
)
# Types are not checked here: the errors are those of a user without a checker.
@pytest.mark.unchecked
def test_bad_operation_is_named(make, message):
    with pytest.raises(DataError, match=message):
        make()


@pytest.mark.parametrize(
    ("afters", "message"),
    [
        ({"a": (), "b": ("z",)}, "operation 'b' follows the unknown operation 'z'"),
        ({"a": ("b",), "b": ()}, "operation 'a' follows 'b', which is listed after it"),
        ({"a": ("a",)}, "operations wait for one another: 'a' before 'a'"),
        (
            {"a": (), "b": ("a", "c"), "c": ("b",)},
            "operations wait for one another: '(b' before 'c' before 'b|c' before 'b' before 'c)'",
        ),
    ],
)
def test_bad_graph_is_named(afters, message):
    with pytest.raises(DataError, match=message):
        simulate([Op(name, "compute", 1.0, after) for name, after in afters.items()])


def test_repeated_name_is_named():
    with pytest.raises(DataError, match="two operations are called 'a', numbers 0 and 1"):
        simulate([Op("a", "compute", 1.0), Op("a", "all_reduce", 1.0)])
