"""The replay against a slow oracle that steps through time, and its invariants, on random plans."""

import itertools
import json
import subprocess
import sys
from types import MappingProxyType

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import DataError
from shared.topology import CriticalStep, Operation, Replay

# Queues by number from 1 on, seconds, earliest start, priority, and what it comes after: which, lag.
# Whole numbers of seconds: sums are then exact and times collide often.
NUMBERS = st.integers(0, 4)
ROWS = st.lists(
    st.tuples(
        st.integers(1, 7), NUMBERS, NUMBERS, NUMBERS, st.lists(st.integers(0, 49), max_size=2)
    ),
    max_size=12,
)


@st.composite
def plans(draw, orders=("given", "readiness", "priority"), shortest_s=0.0, any_way=False):
    """Operations and the order of each queue; dependencies point back unless they may any way."""
    queues = dict(zip("abc", draw(st.tuples(*[st.sampled_from(orders)] * 3)), strict=True))
    operations, rows = [], draw(ROWS)
    for i, (bits, length, earliest, priority, links) in enumerate(rows):
        held = [queue for place, queue in enumerate(queues) if bits >> place & 1]
        if {queues[queue] for queue in held} >= {"readiness", "priority"}:
            held = held[:1]
        others = len(rows) if any_way else i
        # Every other one has a lag.
        after = {n // 2 % others: n % 2 * (1.0 + n // 20) for n in links} if others else {}
        operations.append(
            Operation(
                name=i,
                queue=held[0] if len(held) == 1 else tuple(held),
                duration_s=shortest_s + length,
                after=MappingProxyType(after) if any(after.values()) else list(after),
                earliest_s=float(earliest),
                priority=priority,
            )
        )
    if not any_way and "given" not in queues.values():
        operations = draw(st.permutations(operations))
    return operations, queues


def holds(operation: Operation) -> set[str]:
    return {operation.queue} if isinstance(operation.queue, str) else set(operation.queue)


def waits(operation: Operation) -> dict:
    after = operation.after
    return dict(after) if isinstance(after, MappingProxyType) else dict.fromkeys(after, 0.0)


def longest_paths(operations: list[Operation]) -> dict | None:
    """Start of each operation on queues in the given order; None when they wait in a circle."""
    start = {operation.name: operation.earliest_s for operation in operations}
    length = {operation.name: operation.duration_s for operation in operations}
    for _ in range(len(operations) + 1):
        before = dict(start)
        for i, operation in enumerate(operations):
            ends = [start[other] + length[other] + lag for other, lag in waits(operation).items()]
            ahead = [other.name for other in operations[:i] if holds(other) & holds(operation)]
            ends += [start[other] + length[other] for other in ahead]
            start[operation.name] = max([operation.earliest_s, *ends])
        if start == before:
            return start
    return None


def step_through_time(operations: list[Operation], queues: dict[str, str]) -> dict:
    """Start of each operation, found by asking all of them again and again at each whole second."""
    start, ready, now = {}, {}, 0.0
    listed = {operation.name: i for i, operation in enumerate(operations)}
    lines = {o.name: {q for q in holds(o) if queues[q] != "given"} for o in operations}

    def is_over(operation, lag_s=0.0):
        name = operation.name
        return name in start and start[name] + operation.duration_s + lag_s <= now

    def is_ready(operation):
        given = holds(operation) - lines[operation.name]
        ahead = [o for o in operations[: listed[operation.name]] if holds(o) & given]
        after = [(operations[listed[name]], lag) for name, lag in waits(operation).items()]
        return operation.earliest_s <= now and all(
            is_over(*pair) for pair in [*after, *((o, 0.0) for o in ahead)]
        )

    def is_first(operation, waiting):
        mine = lines[operation.name]
        is_free = not any(
            o.name in start and not is_over(o) and holds(o) & mine for o in operations
        )

        def turn(o):
            first, second = ready[o.name], o.priority
            if "priority" in {queues[q] for q in mine}:
                first, second = second, first
            return first, second, listed[o.name]

        rivals = [o for o in waiting if lines[o.name] & mine]
        return is_free and min(rivals, key=turn) is operation

    while len(start) < len(operations):
        while True:
            while new := [o.name for o in operations if o.name not in ready and is_ready(o)]:
                ready |= dict.fromkeys(new, now)
                start |= {name: now for name in new if not lines[name]}
            waiting = [o for o in operations if o.name in ready and o.name not in start]
            chosen = [o.name for o in waiting if is_first(o, waiting)]
            if not chosen:
                break
            start |= dict.fromkeys(chosen, now)
        now += 1.0
    return start


def starts(replay: Replay, operations: list[Operation]) -> dict:
    return dict(zip([o.name for o in operations], replay.run().start_s.tolist(), strict=True))


@given(plans(orders=["given"]))
def test_given_order_against_longest_paths(plan):
    operations, queues = plan
    assert starts(Replay(operations, queues), operations) == longest_paths(operations)


@given(plans(orders=["given"], shortest_s=1.0, any_way=True))
def test_dependencies_any_way_against_longest_paths(plan):
    operations, queues = plan
    expected = longest_paths(operations)
    if expected is None:
        with pytest.raises(DataError, match=r"cycle: |deadlock between"):
            Replay(operations, queues)
    else:
        assert starts(Replay(operations, queues), operations) == expected


@given(plans())
def test_lines_against_stepping_through_time(plan):
    operations, queues = plan
    assert starts(Replay(operations, queues), operations) == step_through_time(operations, queues)


@given(plans())
def test_everyone_starts_at_the_earliest_time_that_waits_and_queues_allow(plan):
    operations, queues = plan
    replay = Replay(operations, queues)
    span = {operation.name: replay.run().span_s(operation.name) for operation in operations}
    for operation in operations:
        begin, end = span[operation.name]
        assert end == begin + operation.duration_s
        reasons = {operation.earliest_s}
        reasons |= {span[other][1] + lag for other, lag in waits(operation).items()}
        assert begin >= max(reasons)
        for other in operations:
            if other is not operation and holds(other) & holds(operation):
                # Never both at once; who takes no time may stand anywhere between two others.
                assert span[other.name][1] <= begin or end <= span[other.name][0]
                reasons.add(span[other.name][1])
        assert begin in reasons


@given(plans())
def test_critical_path_leads_without_a_gap_to_the_makespan(plan):
    operations, queues = plan
    timeline = Replay(operations, queues).run()
    path = timeline.critical_path
    named = {operation.name: operation for operation in operations}
    assert timeline.makespan_s == max(timeline.end_s, default=0.0)
    if not operations:
        assert path == []
        return
    assert (path[0].cause, path[-1].end_s) == ("release", timeline.makespan_s)
    assert path[0].start_s == named[path[0].name].earliest_s
    assert path[0].start_s + sum(
        step.end_s - step.start_s + step.lag_s for step in path
    ) == pytest.approx(timeline.makespan_s)
    assert len({step.name for step in path}) == len(path)
    for before, step in itertools.pairwise(path):
        assert (step.behind, step.start_s) == (before.name, before.end_s + step.lag_s)
        if step.cause == "dependency":
            assert waits(named[step.name])[step.behind] == step.lag_s
        else:
            assert step.cause == "queue"
            assert step.queue in holds(named[step.name]) & holds(named[step.behind])


@given(plans())
def test_use_and_gaps_fill_the_makespan(plan):
    operations, queues = plan
    timeline = Replay(operations, queues).run()
    assert list(timeline.queues) == list(queues)
    for queue, use in timeline.queues.items():
        mine = [timeline.span_s(o.name) for o in operations if queue in holds(o)]
        gaps = timeline.gaps_s(queue)
        assert use.num_operations == len(mine)
        assert use.busy_s == sum(end - begin for begin, end in mine)
        assert (gaps[:, 0] < gaps[:, 1]).all()
        assert use.busy_s + np.diff(gaps).sum() == timeline.makespan_s
        assert all(end <= a or begin >= b for begin, end in mine for a, b in gaps)
        if mine and timeline.makespan_s:
            assert (use.first_s, use.last_s) == (min(mine)[0], max(end for _, end in mine))
            assert use.idle_share == pytest.approx(1 - use.busy_s / timeline.makespan_s)
        if use.last_s > use.first_s:
            within = 1 - use.busy_s / (use.last_s - use.first_s)
            assert use.idle_share_within == pytest.approx(within)


def test_other_durations_leave_the_replay_as_it_was():
    replay = Replay([Operation("x", "q", 1.0), Operation("y", "q", 2.0)])
    assert replay.run(np.array([5, 0])).makespan_s == 5.0
    timeline = replay.run()
    assert timeline.end_s.tolist() == [1.0, 3.0]
    with pytest.raises(ValueError, match="read-only"):
        timeline.start_s[0] = 7.0


def test_nobody_overtakes_who_waits_for_another_queue():
    operations = [
        Operation("fill", "b in", 5.0),
        Operation("to b", ("a out", "b in"), 1.0, earliest_s=1.0),
        Operation("to c", ("a out", "c in"), 1.0, earliest_s=2.0),
    ]
    for order in ("readiness", "priority"):
        timeline = Replay(operations, dict.fromkeys(["a out", "b in", "c in"], order)).run()
        assert timeline.start_s.tolist() == [0.0, 5.0, 6.0]
    assert timeline.critical_path == [
        CriticalStep("fill", 0.0, 5.0, "release"),
        CriticalStep("to b", 5.0, 6.0, "queue", "fill", queue="b in"),
        CriticalStep("to c", 6.0, 7.0, "queue", "to b", queue="a out"),
    ]


def test_trace_has_a_row_for_each_queue_and_microseconds():
    timeline = Replay(
        [
            Operation(("F", 0), "gpu 0", 0.5),
            Operation("send", ("out", "in"), 0.25, after={("F", 0): 0.125}),
            Operation("short", "gpu 0", 0.125),
        ]
    ).run()
    trace = json.loads(json.dumps(timeline.to_chrome_trace()))
    meta = [event for event in trace["traceEvents"] if event["ph"] == "M"]
    rows = {e["tid"]: e["args"]["name"] for e in meta if e["name"] == "thread_name"}
    assert rows == {0: "gpu 0", 1: "out", 2: "in"}
    assert [
        (e["name"], rows[e["tid"]], e["ts"], e["dur"], e["cat"], e["args"]["after"])
        for e in trace["traceEvents"]
        if e["ph"] == "X"
    ] == [
        ("F 0", "gpu 0", 0.0, 500_000.0, "critical", []),
        ("send", "out", 625_000.0, 250_000.0, "critical", ["F 0"]),
        ("send", "in", 625_000.0, 250_000.0, "critical", ["F 0"]),
        ("short", "gpu 0", 500_000.0, 125_000.0, "operation", []),
    ]


def test_import_is_light():
    check = (
        "import sys, shared.topology.replay; print({'torch', 'numba', 'scipy'} & {*sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", check], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "set()"
