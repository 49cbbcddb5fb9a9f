"""Fuses neighbouring compute operations and neighbouring all-reduces together.

After DisCo ("Optimizing DNN Compilation for Distributed Training with Joint OP and Tensor Fusion",
arXiv 2209.12769; its abstract alone was read): fusing two operators saves a launch, but a gradient
that the first one makes is ready only when both have ended; fusing two all-reduces saves a latency,
but waits for the later gradient. A backtracking search decides on both at once. Its simulator is a
graph network; here a replay with measured times takes its part.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import pairwise
from math import inf, isfinite
from time import perf_counter

from lancet.graph.operations import Op, OpGraph
from shared.errors import ConfigError

__all__ = ["Fusion", "fuse", "replay_groups"]

# Candidates slower than the best by more than this factor are not expanded.
_WORST_RATIO = 1.1
# Expansions without gain after which the search ends.
_PATIENCE = 64
# With at most this many joints, all of their combinations are replayed.
_NUM_EXHAUSTIVE_JOINTS = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Fusion:
    """Groups of operations that run as one.

    Attributes:
        groups: names of each group's operations, groups and names in launch order.
        before_s: makespan without fusion, in seconds.
        makespan_s: makespan with these groups.
    """

    groups: tuple[tuple[str, ...], ...]
    before_s: float
    makespan_s: float


def fuse(
    ops: Iterable[Op],
    *,
    latency_s: float,
    launch_s: float = 0.0,
    time_limit_s: float = 2.0,
    dtypes: Mapping[str, str] | None = None,
) -> Fusion:
    """Chooses which neighbours of one queue run as one operation.

    A group holds neighbours of one queue and one kind, never all-to-alls. It starts when its queue is
    free and all that its members follow have ended, and takes the sum of their times less what
    fusing saves, 0 at least. Queues keep their order.

    Args:
        ops: operations in launch order.
        latency_s: seconds saved for each all-reduce of a group but one.
        launch_s: seconds saved for each compute operation of a group but one.
        time_limit_s: seconds after which the search stops with the best groups so far.
        dtypes: of the all-reduces that may be fused, by name; those of a group have one dtype. None:
            all may be.

    Returns:
        The fastest groups in replay; no fusion, equal buckets, and the best buckets for gradients
        that are ready without fusion are among those tried. Up to twelve pairs that may be fused,
        it is the optimum if time allows.

    Raises:
        ConfigError: a time is negative or not finite.
        DataError: two operations share a name, or one follows an unknown or a later one.
    """
    for key, value in {
        "latency_s": latency_s,
        "launch_s": launch_s,
        "time_limit_s": time_limit_s,
    }.items():
        if not (isfinite(value) and value >= 0):
            raise ConfigError(f"{key}: expected finite seconds of 0 or more, got {value}")
    deadline_s = perf_counter() + time_limit_s
    graph = OpGraph(ops)
    replay = _FusedReplay(graph, launch_s, latency_s, dtypes)
    makespan_s, fused = _search(replay, deadline_s)
    return _describe(graph, replay, fused, makespan_s)


def replay_groups(
    ops: Iterable[Op], groups: Iterable[Sequence[str]], *, latency_s: float
) -> Fusion:
    """Replays operations with groups of all-reduces that are neighbours on their queue.

    Args:
        ops: operations in launch order.
        groups: names of each group's all-reduces, in launch order.
        latency_s: as for `fuse`.

    Returns:
        The groups, and each other operation as one of its own. If groups wait for one another, the
        makespan is infinite, and none is returned.

    Raises:
        DataError: two operations share a name, or one follows an unknown or a later one.
    """
    graph = OpGraph(ops)
    replay = _FusedReplay(graph, 0.0, latency_s, None)
    fused = replay.fuse_pairs({pair for group in groups for pair in pairwise(group)})
    return _describe(graph, replay, fused, replay.run(fused).makespan_s)


def _describe(graph: OpGraph, replay: _FusedReplay, fused: int, makespan_s: float) -> Fusion:
    return Fusion(
        groups=tuple(
            graph.names(group) for group in replay.list_groups(fused if makespan_s < inf else 0)
        ),
        before_s=replay.run(0).makespan_s,
        makespan_s=makespan_s,
    )


@dataclass(slots=True)
class _Lane:
    """One queue, by position in it.

    Attributes:
        ops: numbers of the operations.
        time_s: their seconds.
        need: last position of the other queue that the operation follows; -1 for none.
        joint: bit of the joint between this position and the next; 0 if fusing them saves nothing or
            is not allowed.
        saves_s: seconds that each joint saves.
    """

    ops: list[int]
    time_s: list[float]
    need: list[int]
    joint: list[int]
    saves_s: float


# Next position of each lane, and when each lane is free.
_State = tuple[int, int, float, float]


@dataclass(slots=True)
class _Replayed:
    """A replay with some joints fused.

    Attributes:
        makespan_s: infinite if groups wait for one another.
        ends_s: by lane and position, end of its group.
        states: by lane and first position of each group, the replay's state when it was launched.
    """

    makespan_s: float
    ends_s: list[list[float]]
    states: list[dict[int, _State]]


class _FusedReplay:
    """Replays operations with some joints fused; a set of joints is an integer, a bit for each.

    On one queue an operation never ends before those ahead of it. So of all that a group follows,
    only the last position of the other queue matters.
    """

    def __init__(
        self,
        graph: OpGraph,
        compute_saves_s: float,
        all_reduce_saves_s: float,
        dtypes: Mapping[str, str] | None,
    ) -> None:
        self._graph = graph
        position = {}
        self.joints: list[tuple[int, int]] = []  # by bit, its lane and position
        self.lanes: list[_Lane] = []
        numbers = (graph.compute, graph.communications)
        for ops in numbers:
            position |= {i: k for k, i in enumerate(ops)}
        for lane, saves_s in enumerate((compute_saves_s, all_reduce_saves_s)):
            ops, others = numbers[lane], set(numbers[1 - lane])
            joint = [0] * len(ops)
            for k, (i, following) in enumerate(pairwise(ops)):
                if saves_s and _may_fuse(graph.ops[i], graph.ops[following], dtypes):
                    joint[k] = 1 << len(self.joints)
                    self.joints.append((lane, k))
            need = [
                max((position[j] for j in graph.needs[i] if j in others), default=-1) for i in ops
            ]
            time_s = [graph.time_s[i] for i in ops]
            self.lanes.append(_Lane(ops, time_s, need, joint, saves_s))

    def run(self, fused: int) -> _Replayed:
        """Replays from the start."""
        ends_s = [[0.0] * len(lane.ops) for lane in self.lanes]
        states: list[dict[int, _State]] = [{}, {}]
        makespan_s = self._advance(fused, (0, 0, 0.0, 0.0), ends_s, states)
        return _Replayed(makespan_s, ends_s, states)

    def run_changed(self, base: _Replayed, base_fused: int, bit: int) -> float:
        """Makespan in seconds if one joint is fused or split in another replay's set.

        Replays from the launch of the first group that changes.
        """
        lane, first = self.joints[bit]
        joint = self.lanes[lane].joint
        while first and base_fused & joint[first - 1]:
            first -= 1
        ends_s = [list(ends) for ends in base.ends_s]
        return self._advance(base_fused ^ 1 << bit, base.states[lane][first], ends_s, None)

    def list_groups(self, fused: int) -> list[list[int]]:
        """Numbers of each group's operations, groups in launch order."""
        positions = [0, 0]
        groups: list[list[int]] = []
        while any(positions[lane] < len(self.lanes[lane].ops) for lane in (0, 1)):
            heads = []
            for lane, first in enumerate(positions):
                if first < len(self.lanes[lane].ops):
                    stop, need, _ = self._measure(fused, lane, first)
                    if need < positions[1 - lane]:
                        heads.append((self.lanes[lane].ops[first:stop], lane, stop))
            group, lane, stop = min(heads)  # the one listed first
            groups.append(group)
            positions[lane] = stop
        return groups

    def fuse_pairs(self, pairs: set[tuple[str, str]]) -> int:
        """Fuses pairs of neighbours by their names."""
        fused = 0
        for lane in self.lanes:
            names = self._graph.names(lane.ops)
            for bit, pair in zip(lane.joint, pairwise(names), strict=False):
                fused |= bit if pair in pairs else 0
        return fused

    def fuse_buckets(self, lane: int, size: int, allowed: int) -> int:
        """Fuses buckets of up to `size` neighbours of a lane, at allowed joints only."""
        fused = num_members = 0
        for bit in self.lanes[lane].joint:
            num_members += 1
            if bit & allowed and num_members < size:
                fused |= bit
            else:
                num_members = 0
        return fused

    def fuse_ready(self, base: _Replayed) -> int:
        """Fuses all-reduces so that the last one ends first, if computing ends as in a replay.

        Dynamic programming over the last bucket: exact if no operation waits for a communication.
        """
        lane, ready_s = self.lanes[1], base.ends_s[0]
        free_s, firsts = [0.0], [0]
        # Measured seconds may be less than the latency, and then a longer bucket takes less.
        grows = min(lane.time_s, default=0.0) >= lane.saves_s
        for stop in range(1, len(lane.ops) + 1):
            best_s, best_first = inf, stop - 1
            bucket_s, bucket_ready_s = lane.saves_s, 0.0
            for first in range(stop - 1, -1, -1):
                bucket_s += lane.time_s[first] - lane.saves_s
                if lane.need[first] >= 0:
                    bucket_ready_s = max(bucket_ready_s, ready_s[lane.need[first]])
                end_s = max(free_s[first], bucket_ready_s) + max(bucket_s, 0.0)
                if end_s < best_s:
                    best_s, best_first = end_s, first
                # A longer bucket starts no earlier, as it waits for a gradient and not for the queue.
                is_longer_later = grows and free_s[first] <= bucket_ready_s
                if not first or not lane.joint[first - 1] or is_longer_later:
                    break
            free_s.append(best_s)
            firsts.append(best_first)
        fused, stop = 0, len(lane.ops)
        while stop:
            for k in range(firsts[stop], stop - 1):
                fused |= lane.joint[k]
            stop = firsts[stop]
        return fused

    def _measure(self, fused: int, lane: int, first: int) -> tuple[int, int, float]:
        """Stop, last position needed and seconds of the group that begins at a position."""
        mine = self.lanes[lane]
        need, time_s, k = mine.need[first], mine.time_s[first], first
        while fused & mine.joint[k]:
            k += 1
            time_s += mine.time_s[k] - mine.saves_s
            if (other := mine.need[k]) > need:
                need = other
        return k + 1, need, max(time_s, 0.0)

    def _advance(
        self,
        fused: int,
        state: _State,
        ends_s: list[list[float]],
        states: list[dict[int, _State]] | None,
    ) -> float:
        """Replays from a state to the end, filling `ends_s` and `states`; returns the makespan."""
        positions, free_s = list(state[:2]), list(state[2:])
        lane = num_blocked = 0
        while num_blocked < 2:
            mine, other = self.lanes[lane], ends_s[1 - lane]
            first = positions[lane]
            while first < len(mine.ops):
                stop, need, time_s = self._measure(fused, lane, first)
                if need >= positions[1 - lane]:
                    break
                if states is not None:
                    states[lane][first] = (positions[0], positions[1], free_s[0], free_s[1])
                begin_s = free_s[lane]
                if need >= 0 and other[need] > begin_s:
                    begin_s = other[need]
                free_s[lane] = end_s = begin_s + time_s
                ends_s[lane][first:stop] = [end_s] * (stop - first)
                positions[lane] = first = stop
                num_blocked = 0
            num_blocked += 1
            lane = 1 - lane
        if any(positions[lane] < len(self.lanes[lane].ops) for lane in (0, 1)):
            return inf
        return max(free_s)


def _may_fuse(op: Op, following: Op, dtypes: Mapping[str, str] | None) -> bool:
    if op.kind != following.kind or op.kind == "all_to_all":
        return False
    if op.kind == "compute" or dtypes is None:
        return True
    return op.name in dtypes and dtypes[op.name] == dtypes.get(following.name)


def _search(replay: _FusedReplay, deadline_s: float) -> tuple[float, int]:
    """Makespan and fused joints of the best candidate of a backtracking search."""
    num_joints = len(replay.joints)
    is_small = num_joints <= _NUM_EXHAUSTIVE_JOINTS
    queue: list[tuple[float, int]] = []
    for fused in dict.fromkeys(_list_starts(replay)):
        if (makespan_s := replay.run(fused).makespan_s) < inf:
            heappush(queue, (makespan_s, fused))
    seen = {fused for _, fused in queue}
    best = queue[0]
    num_stale = 0
    while queue and perf_counter() < deadline_s:
        makespan_s, fused = heappop(queue)
        is_worth = makespan_s <= _WORST_RATIO * best[0] and num_stale < _PATIENCE
        if not (is_small or is_worth):
            break
        num_stale += 1
        base = replay.run(fused)
        for bit in range(num_joints):
            changed = fused ^ 1 << bit
            if changed in seen or perf_counter() > deadline_s:
                continue
            seen.add(changed)
            # Groups that wait for one another still do when more is fused. So fusing alone reaches
            # every valid set through valid ones, and an invalid one need not be expanded.
            changed_s = replay.run_changed(base, fused, bit)
            if changed_s < best[0]:
                # Goes on from there with the joints that follow; both are expanded again later.
                best, num_stale = (changed_s, changed), 0
                heappush(queue, (makespan_s, fused))
                makespan_s, fused = best
                base = replay.run(fused)
            if changed_s < inf and (is_small or changed_s <= _WORST_RATIO * best[0]):
                heappush(queue, (changed_s, changed))
    return best


def _list_starts(replay: _FusedReplay) -> Iterator[int]:
    """No fusion, buckets of 2, 4, 8, ... neighbours and of all, and the best buckets for each."""
    yield 0
    base = replay.run(0)
    # A joint alone may already make groups wait for one another.
    allowed = 0
    for bit in range(len(replay.joints)):
        if replay.run_changed(base, 0, bit) < inf:
            allowed |= 1 << bit
    buckets: list[dict[int, None]] = []
    for lane, mine in enumerate(replay.lanes):
        sizes = [2**power for power in range(1, len(mine.ops).bit_length() + 1)]
        fused = [replay.fuse_buckets(lane, size, allowed) for size in sizes]
        buckets.append(dict.fromkeys([0, *fused]))
    for compute in buckets[0]:
        for all_reduces in buckets[1]:
            yield compute | all_reduces
        ready = replay.run(compute)
        if ready.makespan_s < inf:
            yield compute | replay.fuse_ready(ready)
