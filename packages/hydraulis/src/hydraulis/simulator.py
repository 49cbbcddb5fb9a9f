"""Seconds of steps under every strategy, from a cost model: no rank and no GPU is needed.

Strategies place a step's documents on groups of ranks; what a group then takes is added up here, micro-batch
by micro-batch, and not taken from any planner's own objective. Where a document is longer than a rank
holds, a strategy without degrees of its own gets groups of one size, the best of those that hold it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import numpy as np

from hydraulis.config import Cost, SequenceTooLong, check_lengths
from hydraulis.planner.baselines import (
    best_fit_decreasing,
    karmarkar_karp,
    longest_first,
    megatron_rule,
)
from hydraulis.planner.degrees import DegreeCost, DegreePlan
from hydraulis.planner.flexsp import plan as plan_flexsp
from hydraulis.planner.schedule import plan_step
from hydraulis.planner.steps import cut_steps
from shared.errors import ConfigError

__all__ = ["STRATEGIES", "Outcome", "PlacedMicroBatch", "compare", "simulate"]

_VERL = Cost(a=1.0, b=24576.0)
"""verl's constants of a model of 7 billion weights, by which it balances any."""
_FLEXSP = "FlexSP's program"


@dataclass(frozen=True, kw_only=True)
class PlacedMicroBatch:
    """A micro-batch of one group of ranks.

    Attributes:
        first: the group's first rank.
        degree: its ranks.
        lengths: tokens of what is computed: padded rows have the length of the longest.
    """

    first: int
    degree: int
    lengths: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """A strategy's steps.

    Attributes:
        name: of the strategy.
        step_s: seconds of each step; infinite where it cannot place the documents.
        idle_shares: share of all ranks' time in which they wait, of each step.
        rank_s: seconds of each rank in the first step.
        gap: share of the first step's seconds by which the best plan may be shorter.
    """

    name: str
    step_s: tuple[float, ...]
    idle_shares: tuple[float, ...]
    rank_s: tuple[float, ...]
    gap: float

    @property
    def median_s(self) -> float:
        """Median seconds of a step."""
        return median(self.step_s)


Strategy = Callable[[np.ndarray, int, DegreeCost, np.random.Generator], list[PlacedMicroBatch]]


def simulate(work: Iterable[PlacedMicroBatch], num_ranks: int, cost: DegreeCost) -> np.ndarray:
    """Seconds of each rank in a step whose ranks meet at its end [rank].

    The ranks of a group begin a micro-batch together, when the last of them is free.

    Args:
        work: micro-batches, each rank's in their order.
        num_ranks: ranks.
        cost: of groups.
    """
    clock = np.zeros(num_ranks)
    for one in work:
        ranks = slice(one.first, one.first + one.degree)
        lengths = np.array(one.lengths)
        seconds = cost.cost.c + float(cost.seconds(lengths, one.degree).sum())
        clock[ranks] = clock[ranks].max() + seconds
    return clock


def compare(
    lengths: Sequence[int] | np.ndarray,
    num_ranks: int,
    cost: DegreeCost,
    *,
    tokens_per_step: int,
    num_steps: int = 8,
    seed: int = 0,
    names: Sequence[str] = (),
    flexsp_s: float = 5.0,
    on_progress: Callable[[str], None] = lambda _: None,
) -> list[Outcome]:
    """Seconds of the same steps under every strategy.

    Args:
        lengths: tokens of all documents, from which steps are drawn in a seeded shuffle.
        num_ranks: ranks.
        cost: of groups.
        tokens_per_step: over all ranks.
        num_steps: at most; fewer where documents end.
        seed: of the shuffle.
        names: of `STRATEGIES`; all by default.
        flexsp_s: seconds that FlexSP's program may take for each of its micro-batches.
        on_progress: called with the name of the strategy that begins.

    Raises:
        SequenceTooLong: a document exceeds what all ranks hold together.
        ConfigError: no documents or steps, or an unknown strategy.
    """
    known = check_lengths(lengths)
    unknown = [name for name in names if name not in STRATEGIES]
    if unknown or num_steps < 1 or not known.size:
        raise ConfigError(
            f"expected documents, steps and some of {'; '.join(STRATEGIES)}, got {known.size}, "
            f"{num_steps} and {', '.join(unknown) or 'these'}"
        )
    most = int(cost.degrees(num_ranks)[-1]) * cost.cap
    if known.max() > most:
        at = int(known.argmax())
        raise SequenceTooLong(at, int(known[at]), most)
    order = np.random.default_rng(seed).permutation(len(known))
    steps = [
        known[step] for step, _ in zip(
            cut_steps(known, order, tokens_per_step, 1), range(num_steps), strict=False
        )
    ]  # fmt: skip
    bound_s = plan_step(steps[0], num_ranks, cost).bound_s
    strategies = {**STRATEGIES, _FLEXSP: _from_groups(partial(plan_flexsp, time_limit_s=flexsp_s))}
    outcomes = []
    for name in names or STRATEGIES:
        on_progress(name)
        draw = np.random.default_rng(seed)
        clocks = [_run(strategies[name], step, num_ranks, cost, draw) for step in steps]
        ends = [float(clock.max()) for clock in clocks]
        outcomes.append(
            Outcome(
                name=name, step_s=tuple(ends),
                idle_shares=tuple(
                    1 - float(clock.mean()) / end if np.isfinite(end) else 1.0
                    for clock, end in zip(clocks, ends, strict=True)
                ),
                rank_s=tuple(clocks[0].tolist()),
                gap=1 - bound_s / ends[0],
            )
        )  # fmt: skip
    return outcomes


def _run(
    strategy: Strategy,
    step: np.ndarray,
    num_ranks: int,
    cost: DegreeCost,
    draw: np.random.Generator,
) -> np.ndarray:
    """Seconds of each rank; infinite where the documents cannot be placed."""
    try:
        work = strategy(step, num_ranks, cost, draw)
    except ConfigError:
        return np.full(num_ranks, np.inf)
    return simulate(work, num_ranks, cost)


def _best_degree(place: Callable[..., list[list[tuple[int, ...]]]]) -> Strategy:
    """A rule for equal ranks as a strategy: groups of one degree, the best of those that hold all."""

    def strategy(
        step: np.ndarray, num_ranks: int, cost: DegreeCost, draw: np.random.Generator
    ) -> list[PlacedMicroBatch]:
        found = []
        for degree in cost.degrees(num_ranks).tolist():
            if step.max() > degree * cost.cap:
                continue
            queues = place(step, num_ranks // degree, degree * cost.cap, cost, draw)
            found.append([
                PlacedMicroBatch(first=group * degree, degree=degree, lengths=lengths)
                for group, queue in enumerate(queues) for lengths in queue
            ])  # fmt: skip
        return min(found, key=lambda work: float(simulate(work, num_ranks, cost).max()))

    return strategy


def _padded(
    step: np.ndarray, count: int, cap: int, cost: DegreeCost, draw: np.random.Generator
) -> list[list[tuple[int, ...]]]:
    """Documents in random order, as many for each group; rows of a micro-batch padded to its longest."""
    return [_pad(step[part], cap) for part in np.array_split(draw.permutation(len(step)), count)]


def _rebalanced(
    step: np.ndarray, count: int, cap: int, cost: DegreeCost, draw: np.random.Generator
) -> list[list[tuple[int, ...]]]:
    """Batches of documents of like length, dealt from both ends so that padded tokens are alike."""
    batches = _pad(np.sort(step)[::-1], cap)
    queues: list[list[tuple[int, ...]]] = [[] for _ in range(count)]
    order = sorted(batches, key=lambda batch: -sum(batch))
    loads = [0] * count
    for batch in order:
        group = loads.index(min(loads))
        queues[group].append(batch)
        loads[group] += sum(batch)
    return queues


def _pad(lengths: np.ndarray, cap: int) -> list[tuple[int, ...]]:
    """Consecutive documents in micro-batches of rows of one length, as many as fit."""
    found: list[tuple[int, ...]] = []
    held, longest = 0, 0
    for length in lengths.tolist():
        if held and (held + 1) * max(longest, length) > cap:
            found.append((longest,) * held)
            held, longest = 0, 0
        held, longest = held + 1, max(longest, length)
    return [*found, (longest,) * held] if held else found


def _packed_at_random(
    step: np.ndarray, count: int, cap: int, cost: DegreeCost, draw: np.random.Generator
) -> list[list[tuple[int, ...]]]:
    """Documents in random order, packed while they fit; rows are dealt in turn."""
    rows: list[list[int]] = [[]]
    for length in step[draw.permutation(len(step))].tolist():
        if sum(rows[-1]) + length > cap:
            rows.append([])
        rows[-1].append(length)
    return [[tuple(row) for row in rows[group::count]] for group in range(count)]


def _packed_by_best_fit(
    step: np.ndarray, count: int, cap: int, cost: DegreeCost, draw: np.random.Generator
) -> list[list[tuple[int, ...]]]:
    """TRL's packing: best fit, the longest first; rows, shuffled as its loader does, are dealt in turn."""
    rows = best_fit_decreasing(step.tolist(), cap)
    order = draw.permutation(len(rows)).tolist()
    return [
        [tuple(int(step[i]) for i in rows[number]) for number in order[group::count]]
        for group in range(count)
    ]


def _by_shares(shares: Callable[[np.ndarray, int, DegreeCost], np.ndarray]) -> Callable[..., Any]:
    """A rule that gives each document a group; each group packs its own by best fit."""

    def place(
        step: np.ndarray, count: int, cap: int, cost: DegreeCost, draw: np.random.Generator
    ) -> list[list[tuple[int, ...]]]:
        group_of = shares(step, count, cost)
        queues = []
        for group in range(count):
            mine = step[group_of == group]
            rows = best_fit_decreasing(mine.tolist(), cap)
            queues.append([tuple(int(mine[i]) for i in row) for row in rows])
        return queues

    return place


def _from_groups(plan: Callable[[np.ndarray, int, DegreeCost], DegreePlan]) -> Strategy:
    """A planner of one micro-batch of all ranks as a strategy; more are taken where one does not hold."""

    def strategy(
        step: np.ndarray, num_ranks: int, cost: DegreeCost, draw: np.random.Generator
    ) -> list[PlacedMicroBatch]:
        lengths = np.sort(step)[::-1]
        ends = np.cumsum(lengths)
        fewest = max(1, -(-int(ends[-1]) // (num_ranks * cost.cap)))
        for count in range(fewest, len(lengths) + 1):
            bounds = np.searchsorted(ends, ends[-1] * np.arange(1, count) / count) + 1
            try:
                return [
                    one for part in np.split(lengths, bounds)
                    for one in _groups(part, num_ranks, cost, plan)
                ]  # fmt: skip
            except ConfigError:  # too full for so few micro-batches
                continue
        raise ConfigError(f"expected micro-batches that hold {len(lengths)} documents, found none")

    return strategy


def _groups(
    lengths: np.ndarray, num_ranks: int, cost: DegreeCost, plan: Callable[..., DegreePlan]
) -> list[PlacedMicroBatch]:
    if not lengths.size:
        return []
    found = plan(lengths, num_ranks, cost)
    firsts = np.concatenate(([0], np.cumsum(found.degree_of)[:-1]))
    return [
        PlacedMicroBatch(first=int(firsts[group]), degree=int(degree), lengths=tuple(mine.tolist()))
        for group, degree in enumerate(found.degree_of)
        if (mine := lengths[found.group_of == group]).size
    ]


def _ours(
    step: np.ndarray, num_ranks: int, cost: DegreeCost, draw: np.random.Generator
) -> list[PlacedMicroBatch]:
    plan = plan_step(step, num_ranks, cost)
    found: list[PlacedMicroBatch] = []
    for rank, queue in enumerate(plan.micro_batches):
        found += [
            PlacedMicroBatch(
                first=one.first, degree=one.degree,
                lengths=tuple(int(step[i]) for i in one.documents),
            )
            for one in queue if one.first == rank and one.documents
        ]  # fmt: skip
    # Every rank computes its largest groups first.
    return sorted(found, key=lambda one: -one.degree)


STRATEGIES: dict[str, Strategy] = {
    "padded, random order": _best_degree(_padded),
    "padded, like lengths": _best_degree(_rebalanced),
    "packed, random order": _best_degree(_packed_at_random),
    "packed, best fit": _best_degree(_packed_by_best_fit),
    "balanced by 24576 s + s^2": _best_degree(
        _by_shares(lambda step, count, _: karmarkar_karp(_VERL.sequence_s(step), count))
    ),
    "balanced, one degree": _best_degree(
        _by_shares(lambda step, count, cost: longest_first(cost.cost.sequence_s(step), count))
    ),
    "degrees by memory alone": _from_groups(megatron_rule),
    _FLEXSP: _from_groups(plan_flexsp),
    "hydraulis": _ours,
}
"""Ways to place a step's documents: padded as without any packing, and as transformers'
`batch_rebalance`; packed as they come, and as TRL; balanced as verl, and by the cost itself under one
degree; Megatron's dynamic context parallelism; FlexSP; and ours."""
