"""A step's documents to ranks, whose degree of context parallelism changes from micro-batch to micro-batch.

Groups are of powers of two and lie within one another: ranks 0 to 3, of them 0 and 1, of these rank 0
alone. Every rank computes the micro-batches of its largest group first and its own last, so that the
ranks of a group have had the same to do whenever they meet, and none waits. Degrees follow the documents
as in FlexSP (arXiv 2412.01523) and Megatron's dynamic context parallelism; here a document gets as many
ranks as memory asks for, or more where it alone would end after all others.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heapify, heapreplace

import numpy as np
from jaxtyping import Float

from hydraulis.config import SequenceTooLong, check_lengths
from hydraulis.planner.assignment import AssignmentProblem, assign
from hydraulis.planner.degrees import DegreeCost, plan_degrees
from hydraulis.planner.packing import pack
from hydraulis.planner.steps import SYNCS, plan_slots
from shared.errors import ConfigError

__all__ = ["MicroBatch", "StepPlan", "plan_step", "step_bound"]

_LIMITS = (1.0, 1.02, 1.05, 1.1, 1.2, 1.4, 1.7, 2.0, 3.0)
"""Multiples of the bound that a document may take before it gets more ranks."""
_MOST_RAISED, _MOST_TRIED = 8, 3
"""Documents that get more ranks to fill the others' waiting, and those that are tried for each."""
_ENOUGH_IDLE = 0.01
_MUCH_FIXED = 0.1
"""Share of a step's bound from which on a micro-batch's fixed part may outweigh the time of documents."""
_MOST_MORE_SLOTS = 4
_MOST_PAIRS = 1 << 20
"""Pairs of documents and micro-batches up to which these are filled all at once."""
_LEAST_GAIN = 0.05
"""Share of a step that context parallelism must save where nothing needs it: its pieces are smaller, and
its messages seldom free, whatever `message_s` says."""


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """Documents that one group of ranks computes together.

    Attributes:
        first: the group's first rank.
        degree: its ranks.
        documents: indices of the step's documents; none where ranks only take part in what all do.
    """

    first: int
    degree: int
    documents: tuple[int, ...]

    @property
    def ranks(self) -> range:
        """The ranks of the group."""
        return range(self.first, self.first + self.degree)


@dataclass(frozen=True, kw_only=True, eq=False)
class StepPlan:
    """What every rank computes in a step.

    Attributes:
        lengths: tokens of the step's documents.
        micro_batches: of each rank, in order; ranks of one group share an entry.
        seconds: of each rank, waiting for others not counted.
        makespan_s: seconds until the last rank ends.
        bound_s: seconds that no plan is below.
    """

    lengths: tuple[int, ...]
    micro_batches: tuple[tuple[MicroBatch, ...], ...]
    seconds: Float[np.ndarray, " rank"]
    makespan_s: float
    bound_s: float

    @property
    def gap(self) -> float:
        """Share of the makespan by which the best plan may be shorter."""
        return 1 - self.bound_s / self.makespan_s if self.makespan_s else 0.0

    @property
    def idle_share(self) -> float:
        """Share of all ranks' time in which they wait."""
        return 1 - float(self.seconds.mean()) / self.makespan_s if self.makespan_s else 0.0

    @cached_property
    def digest(self) -> str:
        """16 hexadecimal digits of lengths and micro-batches, by which ranks compare their plans."""
        text = repr((self.lengths, self.micro_batches))
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def plan_step(
    lengths: Sequence[float] | np.ndarray, num_ranks: int, cost: DegreeCost, sync: str = "step"
) -> StepPlan:
    """Plans a step.

    Args:
        lengths: tokens of the step's documents.
        num_ranks: ranks, all alike.
        cost: seconds and tokens of groups.
        sync: "step" where ranks meet after the step, "micro-batch" where they do after each
            micro-batch (FSDP): then each rank has as many, perhaps some without documents.

    Raises:
        SequenceTooLong: a document exceeds what the largest group holds.
        ConfigError: there are no documents or ranks, or an unknown `sync`.
    """
    known = check_lengths(lengths)
    if sync not in SYNCS:
        raise ConfigError(f"sync: expected one of {', '.join(SYNCS)}, got {sync!r}")
    if num_ranks < 1 or not known.size:
        raise ConfigError(
            f"plan_step: expected ranks and documents, got {num_ranks} and {known.size}"
        )
    degrees = cost.degrees(num_ranks)
    most = int(degrees[-1]) * cost.cap
    if known.max() > most:
        at = int(known.argmax())
        raise SequenceTooLong(at, int(known[at]), most)
    search = _Steps(known, num_ranks, cost, degrees)
    return search.by_step() if sync == "step" else search.by_slots()


def step_bound(lengths: np.ndarray, num_ranks: int, cost: DegreeCost) -> float:
    """Seconds that no plan of a step is below, whose documents fit.

    A document takes its seconds at the degree that suits it best, in a micro-batch; and all ranks together
    take each document's least product of ranks and seconds, and a fixed part for each rank of each
    micro-batch, of which at least as many are needed as hold all tokens.
    """
    degrees = cost.degrees(num_ranks)
    seconds = np.stack([cost.seconds(lengths, int(d)) for d in degrees], axis=1)
    fits = lengths[:, None] <= degrees * cost.cap
    alone = np.where(fits, seconds, np.inf).min(axis=1).max()
    areas = np.where(fits, seconds * degrees, np.inf).min(axis=1).sum()
    fixed_s, tokens = cost.cost.c, int(lengths.sum())
    return max(
        float(alone) + fixed_s,
        (float(areas) + fixed_s * -(-tokens // cost.cap)) / num_ranks,
        fixed_s * -(-tokens // (cost.cap * num_ranks)),
    )


class _Steps:
    """Plans of one step's documents under several limits."""

    def __init__(
        self, lengths: np.ndarray, num_ranks: int, cost: DegreeCost, degrees: np.ndarray
    ) -> None:
        self.lengths, self.num_ranks, self.cost, self.degrees = lengths, num_ranks, cost, degrees
        self.seconds = np.stack([cost.seconds(lengths, int(d)) for d in degrees], axis=1)
        self.fits = lengths[:, None] <= degrees * cost.cap
        self.bound_s = step_bound(lengths, num_ranks, cost)

    def by_step(self) -> StepPlan:
        """The best of plans whose ranks meet at the end."""
        tried: dict[bytes, tuple[StepPlan, np.ndarray]] = {}
        wanted = [
            self._degrees(limit_s)
            for limit_s in (np.inf, *(factor * self.bound_s for factor in _LIMITS))
        ]
        if self.cost.cost.c > _MUCH_FIXED * self.bound_s:
            # Short documents that fill a large group's micro-batch spare one of their own.
            wanted += [np.maximum(wanted[0], number) for number in range(1, len(self.degrees))]
        for chosen in wanted:
            if chosen.tobytes() not in tried:
                tried[chosen.tobytes()] = self._place(chosen), chosen
        plan, chosen = min(tried.values(), key=lambda one: one[0].makespan_s)
        for _ in range(_MOST_RAISED):
            better = self._raise_one(plan, chosen)
            if better is None:
                break
            plan, chosen = better
        if int(self.lengths.sum()) > self.num_ranks * self.cost.cap:
            return plan
        try:
            at_once = self._plan_slots([np.arange(len(self.lengths))])
        except ConfigError:  # too full for one micro-batch each
            return plan
        return min(plan, at_once, key=lambda one: one.makespan_s)

    def _raise_one(self, plan: StepPlan, chosen: np.ndarray) -> tuple[StepPlan, np.ndarray] | None:
        """A better plan in which one of the last rank's largest documents has more ranks, if there is."""
        if plan.idle_share < _ENOUGH_IDLE:
            return None
        last = plan.micro_batches[int(plan.seconds.argmax())]
        held = np.array([i for one in last for i in one.documents], dtype=np.int64)
        held = held[chosen[held] + 1 < len(self.degrees)]
        for at in held[np.argsort(-self.seconds[held, chosen[held]], kind="stable")][:_MOST_TRIED]:
            raised = chosen.copy()
            raised[at] += 1
            found = self._place(raised)
            if found.makespan_s < plan.makespan_s * (1 - 1e-9):
                return found, raised
        return None

    def _degrees(self, limit_s: float) -> np.ndarray:
        """The least degree by which each document ends in time, its fastest if none does."""
        in_time = self.fits & (self.seconds <= limit_s)
        fastest = np.where(self.fits, self.seconds, np.inf).argmin(axis=1)
        return np.where(in_time.any(axis=1), in_time.argmax(axis=1), fastest)

    def _place(self, chosen: np.ndarray) -> StepPlan:
        loads = np.zeros(self.num_ranks)
        queues: list[list[MicroBatch]] = [[] for _ in range(self.num_ranks)]
        for number in range(len(self.degrees) - 1, -1, -1):
            mine = np.flatnonzero(chosen == number)
            if mine.size:
                self._place_level(mine, number, loads, queues)
        for rank, queue in enumerate(queues):
            if not queue:
                queue.append(MicroBatch(first=rank, degree=1, documents=()))
        return self._plan(queues, loads, float(loads.max()))

    def _place_level(
        self, mine: np.ndarray, number: int, loads: np.ndarray, queues: list[list[MicroBatch]]
    ) -> None:
        """Documents of one degree to its groups, each to the one with least to do."""
        degree = int(self.degrees[number])
        firsts = np.arange(0, self.num_ranks // degree * degree, degree)
        group_of = _spread(self.seconds[mine, number], loads[firsts])
        for group, first in enumerate(firsts.tolist()):
            held = mine[group_of == group]
            if not held.size:
                continue
            found = pack(self.lengths[held], self.cost.cost, self.cost.cap * degree).micro_batches
            ranks = slice(first, first + degree)
            loads[ranks] += self.seconds[held, number].sum() + self.cost.cost.c * len(found)
            for part in found:
                documents = tuple(held[list(part)].tolist())
                micro_batch = MicroBatch(first=first, degree=degree, documents=documents)
                for queue in queues[ranks]:
                    queue.append(micro_batch)

    def by_slots(self) -> StepPlan:
        """The best of plans whose ranks meet after every micro-batch.

        Documents of like length meet, over as many ranks as they need; or, where one rank holds any of
        them, none lies over several, and all micro-batches are alike.
        """
        order = np.argsort(-self.lengths, kind="stable")
        tokens = int(self.lengths.sum())
        fewest = max(1, -(-tokens // (self.cost.cap * self.num_ranks)))
        alone, plans = self._plans_alone(fewest), []
        for count in range(fewest, fewest + _MOST_MORE_SLOTS + len(self.lengths)):
            if count > fewest + _MOST_MORE_SLOTS and plans:
                break
            slots = _cut(self.lengths[order], count)
            try:
                plans.append(self._plan_slots([order[slot] for slot in slots]))
            except ConfigError:  # too full for this number of slots
                continue
        best = min(plans, key=lambda plan: plan.makespan_s)
        simple = min(alone, key=lambda plan: plan.makespan_s, default=best)
        return best if best.makespan_s < (1 - _LEAST_GAIN) * simple.makespan_s else simple

    def _plans_alone(self, fewest: int) -> list[StepPlan]:
        """Plans of several numbers of micro-batches, all alike, each on one rank; none where that cannot be."""
        plans = []
        if self.degrees[0] > 1 or self.lengths.max() > self.cost.cap:
            return plans
        for count in range(fewest, fewest + _MOST_MORE_SLOTS + 1):
            if count * self.num_ranks * len(self.lengths) > _MOST_PAIRS:
                break
            found = plan_slots(self.lengths, self.num_ranks, self.cost.cost, self.cost.cap, count)
            plans += [] if found is None else [self._plan_alone(found)]
        return plans

    def _plan_alone(self, documents: list[list[list[int]]]) -> StepPlan:
        """A plan of documents by rank and slot, each on one rank."""
        taken = np.array(
            [
                [self.cost.cost.micro_batch_s(self.lengths[one]) for one in queue]
                for queue in documents
            ]
        )
        queues = [
            [MicroBatch(first=rank, degree=1, documents=tuple(one)) for one in queue]
            for rank, queue in enumerate(documents)
        ]
        return self._plan(queues, taken.sum(axis=1), float(taken.max(axis=0).sum()))

    def _plan_slots(self, slots: list[np.ndarray]) -> StepPlan:
        queues: list[list[MicroBatch]] = [[] for _ in range(self.num_ranks)]
        loads, makespan_s = np.zeros(self.num_ranks), 0.0
        for slot in slots:
            found = plan_degrees(self.lengths[slot], self.num_ranks, self.cost)
            taken = found.seconds(self.lengths[slot], self.cost)
            makespan_s += found.makespan_s
            first = 0
            for group, degree in enumerate(found.degree_of.tolist()):
                documents = tuple(slot[found.group_of == group].tolist())
                micro_batch = MicroBatch(first=first, degree=degree, documents=documents)
                loads[first : first + degree] += taken[group]
                for queue in queues[first : first + degree]:
                    queue.append(micro_batch)
                first += degree
            for rank in range(first, self.num_ranks):
                queues[rank].append(MicroBatch(first=rank, degree=1, documents=()))
        return self._plan(queues, loads, makespan_s)

    def _plan(
        self, queues: list[list[MicroBatch]], loads: np.ndarray, makespan_s: float
    ) -> StepPlan:
        return StepPlan(
            lengths=tuple(self.lengths.tolist()), micro_batches=tuple(map(tuple, queues)),
            seconds=loads, makespan_s=makespan_s, bound_s=min(self.bound_s, makespan_s),
        )  # fmt: skip


def _spread(seconds: np.ndarray, loads: np.ndarray) -> np.ndarray:
    """Groups of documents beside what the groups have to do already."""
    count = len(loads)
    if len(seconds) * count <= 1 << 16:
        # What a group has to do already stands as a document of its own.
        fixed = np.full((count, count), float(loads.max(initial=0.0)))
        np.fill_diagonal(fixed, loads)
        fits = np.ones((len(seconds) + count, count), dtype=bool)
        fits[len(seconds) :] = np.eye(count, dtype=bool)
        rows = np.repeat(seconds[:, None], count, axis=1)
        found = assign(
            AssignmentProblem(
                seconds=np.ascontiguousarray(np.concatenate((rows, fixed))),
                warm_up=np.zeros(count), fits=fits, tokens=np.ones(len(fits)),
                room=np.full(count, np.inf),
            )
        )  # fmt: skip
        assert found is not None, "there is room for all"
        return found[: len(seconds)]
    heap = [(float(load), group) for group, load in enumerate(loads)]
    heapify(heap)
    group_of = np.empty(len(seconds), dtype=np.int64)
    for at in np.argsort(-seconds, kind="stable").tolist():
        load, group = heap[0]
        group_of[at] = group
        heapreplace(heap, (load + float(seconds[at]), group))
    return group_of


def _cut(lengths: np.ndarray, count: int) -> list[np.ndarray]:
    """Places of consecutive documents, of about as many tokens in each part; none is empty."""
    ends = np.cumsum(lengths)
    bounds = np.searchsorted(ends, ends[-1] * np.arange(1, count) / count, side="left") + 1
    parts = np.split(np.arange(len(lengths)), bounds)
    return [part for part in parts if part.size]
