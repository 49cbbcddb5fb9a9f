from itertools import pairwise, product
from math import inf

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from lancet_programs import programs

from lancet.graph.operations import Op
from lancet.planner.fusion import fuse, replay_groups
from shared.errors import ConfigError, DataError
from shared.topology import Operation, Replay


def makespan_s(ops, groups, latency_s, launch_s):
    """Replay of groups by the shared simulator; None if they wait for one another."""
    by_name = {op.name: op for op in ops}
    group_of = {name: number for number, group in enumerate(groups) for name in group}
    operations = []
    for number, group in enumerate(groups):
        kind = by_name[group[0]].kind
        saves_s = latency_s if kind == "all_reduce" else launch_s
        time_s = sum(by_name[name].time_s for name in group) - (len(group) - 1) * saves_s
        after = {group_of[other] for name in group for other in by_name[name].after} - {number}
        queue = "compute" if kind == "compute" else "communication"
        operations.append(Operation(number, queue, max(time_s, 0.0), tuple(after)))
    try:
        return Replay(operations).run().makespan_s
    except DataError:
        return None


def list_groupings(ops, kinds=("compute", "all_reduce")):
    """All ways to fuse neighbours of a queue and a kind, of those that may be fused."""
    lanes = [[op for op in ops if (op.kind == "compute") == side] for side in (True, False)]
    joints = [
        (a.name, b.name)
        for lane in lanes
        for a, b in pairwise(lane)
        if a.kind == b.kind and a.kind in kinds
    ]
    for choice in product((False, True), repeat=len(joints)):
        fused = {joint for joint, is_fused in zip(joints, choice, strict=True) if is_fused}
        groups = []
        for lane in lanes:
            for number, op in enumerate(lane):
                if number and (lane[number - 1].name, op.name) in fused:
                    groups[-1] += (op.name,)
                else:
                    groups.append((op.name,))
        yield groups


def check_groups(ops, groups):
    kinds = {op.name: op.kind for op in ops}
    position = {op.name: number for number, op in enumerate(ops)}
    flat = [name for group in groups for name in group]
    assert sorted(flat) == sorted(kinds)
    for side in (True, False):
        lane = [name for name in flat if (kinds[name] == "compute") == side]
        assert lane == sorted(lane, key=position.__getitem__)
    assert all(len({kinds[name] for name in group}) == 1 for group in groups)
    assert all(len(group) == 1 or kinds[group[0]] != "all_to_all" for group in groups)
    launched = set()
    for group in groups:
        launched |= set(group)
        assert launched.issuperset(o for op in ops if op.name in group for o in op.after)


@st.composite
def gradient_programs(draw, waits=False, least_quarters=4):
    """Up to six operators and six all-reduces of what they make."""
    num = draw(st.integers(1, 6))
    ops = []
    for number in range(num):
        earlier = [op.name for op in ops if waits or op.kind == "compute"]
        after = draw(st.lists(st.sampled_from(earlier), max_size=2)) if earlier else []
        ops.append(Op(f"c{number}", "compute", draw(st.integers(1, 8)) / 2, tuple(after)))
        if draw(st.integers(0, 3)):
            source = draw(st.sampled_from([op.name for op in ops if op.kind == "compute"]))
            quarters = draw(st.integers(least_quarters, 16))
            ops.append(Op(f"r{number}", "all_reduce", quarters / 4, (source,)))
    return ops


SAVES = st.sampled_from([0.0, 0.25, 0.5, 1.0])


@given(gradient_programs() | gradient_programs(waits=True), SAVES, SAVES)
def test_fusion_is_the_best_of_all_groupings(ops, latency_s, launch_s):
    fusion = fuse(ops, latency_s=latency_s, launch_s=launch_s)
    check_groups(ops, fusion.groups)
    replayed = (makespan_s(ops, groups, latency_s, launch_s) for groups in list_groupings(ops))
    least_s = min(time_s for time_s in replayed if time_s is not None)
    assert fusion.makespan_s == pytest.approx(least_s)
    assert makespan_s(ops, fusion.groups, latency_s, launch_s) == pytest.approx(least_s)


@given(programs(), SAVES, SAVES)
def test_any_program_is_fused_best(ops, latency_s, launch_s):
    fusion = fuse(ops, latency_s=latency_s, launch_s=launch_s)
    check_groups(ops, fusion.groups)
    replayed = (makespan_s(ops, groups, latency_s, launch_s) for groups in list_groupings(ops))
    least_s = min(time_s for time_s in replayed if time_s is not None)
    assert fusion.makespan_s == pytest.approx(least_s)
    assert fusion.before_s == pytest.approx(
        makespan_s(ops, [(op.name,) for op in ops], latency_s, launch_s)
    )


# The second sum takes less than the latency, so that the last one ends earlier together with it.
QUICK_SUM = [
    Op("c0", "compute", 0.5),
    Op("r0", "all_reduce", 0.5, ("c0",)),
    Op("c1", "compute", 0.5),
    Op("r1", "all_reduce", 0.0, ("c0",)),
    Op("c2", "compute", 0.5),
    Op("r2", "all_reduce", 0.25, ("c2",)),
]


@given(gradient_programs() | gradient_programs(least_quarters=0), SAVES)
@example(QUICK_SUM, 0.25)
def test_buckets_of_gradients_need_no_search(ops, latency_s):
    # Nothing waits for an all-reduce, and computing is not fused: the first buckets are the best.
    fusion = fuse(ops, latency_s=latency_s, time_limit_s=0.0)
    groupings = list_groupings(ops, ("all_reduce",))
    replayed = (makespan_s(ops, groups, latency_s, 0.0) for groups in groupings)
    assert fusion.makespan_s == pytest.approx(min(s for s in replayed if s is not None))


def test_fusing_by_hand():
    # Gradients at 1, 2 and 6 s; all-reduces take 2 s, of which 1.5 s are latency.
    ops = [
        Op("c0", "compute", 1.0),
        Op("r0", "all_reduce", 2.0, ("c0",)),
        Op("c1", "compute", 1.0),
        Op("r1", "all_reduce", 2.0, ("c1",)),
        Op("c2", "compute", 4.0),
        Op("r2", "all_reduce", 2.0, ("c2",)),
    ]
    fusion = fuse(ops, latency_s=1.5)
    assert (fusion.before_s, fusion.makespan_s) == (8.0, 8.0)
    assert fusion.groups == (("c0",), ("r0",), ("c1",), ("r1",), ("c2",), ("r2",))
    # If computing is fast, the first waits for the others' gradients.
    quick = [
        Op(op.name, op.kind, op.time_s / (4 if op.kind == "compute" else 1), op.after) for op in ops
    ]
    assert fuse(quick, latency_s=1.5).makespan_s < fuse(quick, latency_s=0.0).makespan_s


def test_fused_groups_never_wait_for_one_another():
    # c1 waits for the sum of what c0 makes: they cannot be one operation.
    ops = [
        Op("c0", "compute", 1.0),
        Op("r0", "all_reduce", 1.0, ("c0",)),
        Op("c1", "compute", 1.0, ("r0",)),
    ]
    assert fuse(ops, latency_s=0.5, launch_s=0.9).groups == (("c0",), ("r0",), ("c1",))
    ops.append(Op("r1", "all_reduce", 1.0, ("c1",)))
    fusion = replay_groups(ops, [("r0", "r1")], latency_s=0.5)
    assert fusion.makespan_s == inf
    assert fusion.groups == (("c0",), ("r0",), ("c1",), ("r1",))


@st.composite
def long_backwards(draw):
    ops = []
    for layer in range(draw(st.integers(14, 40))):
        previous = (ops[-1].name,) if ops else ()
        if layer % 7 == 6:
            ops.append(Op(f"x{layer}", "all_to_all", draw(st.floats(0.5, 3)), previous))
            previous = (ops[-1].name,)
        ops.append(Op(f"c{layer}", "compute", draw(st.floats(0.2, 3)), previous))
        ops.append(Op(f"r{layer}", "all_reduce", draw(st.floats(1, 3)), (f"c{layer}",)))
        ops.append(Op(f"d{layer}", "compute", draw(st.floats(0.2, 3)), (f"c{layer}",)))
    return ops


@given(long_backwards(), st.sampled_from([0.2, 1.0]), st.sampled_from([0.0, 0.2]))
def test_long_program_is_never_slower_than_buckets(ops, latency_s, launch_s):
    fusion = fuse(ops, latency_s=latency_s, launch_s=launch_s, time_limit_s=0.02)
    check_groups(ops, fusion.groups)
    fused_s = makespan_s(ops, fusion.groups, latency_s, launch_s)
    assert fusion.makespan_s == pytest.approx(fused_s)
    assert fused_s <= fusion.before_s + 1e-9
    for size in (2, 4, 8, 64):
        groups, bucket = [], []
        lane = [op for op in ops if op.kind != "compute"]
        for number, op in enumerate(lane):
            bucket.append(op.name)
            is_end = number + 1 == len(lane) or "all_to_all" in (op.kind, lane[number + 1].kind)
            if is_end or len(bucket) == size:
                groups.append(tuple(bucket))
                bucket = []
        groups = [*((op.name,) for op in ops if op.kind == "compute"), *groups]
        bucketed_s = makespan_s(ops, groups, latency_s, launch_s)
        assert bucketed_s is None or fused_s <= bucketed_s + 1e-9


def test_bad_seconds_are_named():
    for key in ("latency_s", "launch_s", "time_limit_s"):
        with pytest.raises(
            ConfigError, match=f"{key}: expected finite seconds of 0 or more, got -1"
        ):
            fuse([], **({"latency_s": 0.0} | {key: -1.0}))
    assert fuse([], latency_s=1.0).groups == ()
