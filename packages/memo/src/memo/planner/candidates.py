"""Plans worth looking at: layers come in up to three runs, in the order of the forward.

The first ones store items, the next ones keep items on the device, and the last ones keep all that
autograd saves. Which items are there goes by the seconds that a byte saves, which is optimal for one
limit (after the linear program of MEMO, arXiv 2407.12117, as a fractional knapsack). Plans that share
all but how many layers the second run has are a family: its fastest that fits is found by bisection.

Layers by tiles and a loss in blocks round otherwise than plain training, so that plans with them are looked
at apart.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, groupby

from memo.config import Budget
from memo.planner.footprint import Footprint, LayerFootprint, add_up, layer_footprint
from memo.planner.layer_plan import ATTENTION, INPUT, LayerPlan
from memo.planner.plan import Plan
from memo.planner.profile import LayerProfile, StepProfile

__all__ = ["Candidate", "Candidates", "Family"]

_FRACTIONS = (0.0, 0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875)


Way = tuple[LayerPlan, ...]
"""A plan for each kind of layers."""


Run = tuple[LayerPlan, LayerFootprint, int]
"""A plan of layers that follow one another, what each takes, and how many there are."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A plan and what it takes.

    Attributes:
        runs: layers with one plan that follow one another, and how many.
        has_block_loss: see `Plan`.
        held: bytes.
        least_s: seconds without any wait: no replay is faster.
    """

    runs: tuple[tuple[LayerPlan, int], ...]
    has_block_loss: bool
    held: Footprint
    least_s: float

    def plan(self, store: str, budget: Budget) -> Plan:
        """The plan itself, with a store of this name."""
        return Plan(
            layers=tuple(layer for layer, count in self.runs for _ in range(count)),
            store=store,
            store_limit_bytes=budget.store_bytes or None,
            has_block_loss=self.has_block_loss,
        )


@dataclass(frozen=True, slots=True)
class Family:
    """Plans that keep as many layers whole, and share the others among two ways.

    Attributes:
        first, second: the ways, by number.
        num_kept: layers that keep all.
        least_s: no plan of it is faster.
    """

    first: int
    second: int
    num_kept: int
    least_s: float


class Candidates:
    """Plans within a budget, fast ones first.

    Where layers are of several kinds, a way has a plan for each: as many of a kind's items stay or are stored as of
    the others', those first whose bytes save the most seconds.
    """

    def __init__(
        self,
        profile: StepProfile,
        budget: Budget,
        *,
        has_block_loss: bool = False,
        has_tiles: bool = False,
    ) -> None:
        """Takes what there is to choose from.

        Args:
            profile: what a step takes without a plan.
            budget: hard limits.
            has_block_loss: whether the loss is computed in blocks, which the profile then has.
            has_tiles: whether layers that are not kept go by tiles, of all kinds that the profile has tiles of.
        """
        self._profile, self._budget = profile, budget
        self._has_block_loss = has_block_loss
        self._store_limit = budget.store_bytes if profile.send is not None else 0
        self._kinds = kinds = profile.kinds
        numbers = {id(kind): number for number, kind in enumerate(kinds)}
        self._kind_numbers = [numbers[id(layer)] for layer in profile.layers]
        has_store = self._store_limit > 0
        self._segments = [(kind, len(list(layers))) for kind, layers in groupby(self._kind_numbers)]
        head_s = profile.block_head_s if has_block_loss else profile.head_s
        self._passes_s, self._head_s = profile.passes_s, head_s or 0.0
        keep = (LayerPlan(),) * len(kinds)
        again = [
            (_restored if not has_tiles or one.tiles is None else _tiled)(one) for one in kinds
        ]
        stored = [_stored(one, has_tiles=has_tiles) if has_store else [] for one in kinds]
        second_ways = [*_aligned(again), keep]
        first_ways = [
            *_aligned([one or other[:1] for one, other in zip(stored, again, strict=True)]),
            second_ways[0],
        ]
        self._ways = _distinct([*first_ways, *second_ways])
        self._first_ways = [self._ways.index(one) for one in _distinct(first_ways)]
        self._second_ways = [self._ways.index(one) for one in _distinct(second_ways)]
        self._keep = self._ways.index(keep)
        plan = Plan(layers=(LayerPlan(),))
        self._rules = {"num_buffers": plan.num_buffers, "max_sending": plan.max_sending}
        self._held = [
            [layer_footprint(layer, kind, plan.cut) for layer, kind in zip(way, kinds, strict=True)]
            for way in self._ways
        ]

        stored = [[one.stored_bytes for one in held] for held in self._held]
        self._num_stored = [
            bisect_right(
                list(accumulate(one[kind] for kind in self._kind_numbers)), self._store_limit
            )
            for one in stored
        ]

    def fits(self, held: Footprint) -> bool:
        """Whether both limits hold."""
        return (
            held.peak_bytes <= self._budget.device_bytes and held.store_bytes <= self._store_limit
        )

    def smallest(self) -> Footprint:
        """The step that takes fewest bytes of those whose layers all go one way."""
        count = len(self._kind_numbers)
        runs = [self._runs([(way, count)]) for way in range(len(self._ways))]
        steps = [self._add_up([(held, count) for _, held, count in one]) for one in runs]
        return min(steps, key=lambda one: one.peak_bytes)

    def again(self) -> Candidate:
        """All layers computed again from their inputs, which stay."""
        return self._candidate(Family(self._second_ways[0], self._keep, 0, 0.0), 0)

    def families(self) -> list[Family]:
        """Those that may fit, by their least seconds."""
        fitting = {way for way in range(len(self._ways)) if self._fits_alone(way)}
        return sorted(self._families(fitting), key=lambda one: one.least_s)

    def _fits_alone(self, way: int) -> bool:
        """Whether a step of one layer that goes this way fits, as it must where there are more."""
        return any(self.fits(self._add_up([(held, 1)])) for held in self._held[way])

    def _families(self, fitting: set[int]) -> Iterator[Family]:
        """Those of which at least one way is among the fitting ones."""
        count = len(self._kind_numbers)
        numbers = range(count, -1, -max(1, count // 16))
        if self._keep not in fitting:
            numbers = range(1)
        for first in self._first_ways:
            for second in self._second_ways:
                if not fitting & {first, second}:
                    continue
                more = [min(self._more_s(way, k) for way in (first, second)) for k in self._numbers]
                sums = [0.0, *accumulate(more[kind] for kind in self._kind_numbers)]
                # Where the second run keeps all too, its number is found exactly.
                for num_kept in (0,) if second == self._keep else numbers:
                    least_s = self._passes_s + self._head_s + sums[count - num_kept]
                    yield Family(first, second, num_kept, least_s)

    @property
    def _numbers(self) -> range:
        return range(len(self._kinds))

    def _more_s(self, way: int, kind: int) -> float:
        """Seconds of a layer beyond those of a kept one."""
        return self._held[way][kind].passes_s - self._held[self._keep][kind].passes_s

    def of(self, family: Family) -> Iterator[Candidate]:
        """Plans of a family: with as many layers of the second run as fit, and with as few or all."""
        high = len(self._kind_numbers) - family.num_kept
        # The store holds so many of the first run, and the second stores nothing.
        low = max(0, high - self._num_stored[family.first])
        smallest = self._candidate(family, low)
        if not self.fits(smallest.held):
            # More layers on the device may still spare buffers and store, but only all of them do.
            yield smallest
            yield self._candidate(family, high)
            return
        yield smallest
        largest = smallest
        while low < high:  # more layers that keep items take more bytes and fewer seconds
            middle = (low + high + 1) // 2
            candidate = self._candidate(family, middle)
            if self.fits(candidate.held):
                low, largest = middle, candidate
            else:
                high = middle - 1
        yield largest

    def _runs(self, counts: list[tuple[int, int]]) -> list[Run]:
        """Layers that follow one another with one plan, given how many go each way."""
        runs: list[Run] = []
        segments = iter(self._segments)
        kind, left = 0, 0
        for way, count in counts:
            while count:
                if not left:
                    kind, left = next(segments)
                taken = min(count, left)
                runs.append((self._ways[way][kind], self._held[way][kind], taken))
                count, left = count - taken, left - taken
        return runs

    def _add_up(self, runs: list[tuple[LayerFootprint, int]]) -> Footprint:
        return add_up(runs, self._profile, has_block_loss=self._has_block_loss, **self._rules)

    def _candidate(self, family: Family, num_second: int) -> Candidate:
        num_first = len(self._kind_numbers) - family.num_kept - num_second
        runs = self._runs(
            [(family.first, num_first), (family.second, num_second), (self._keep, family.num_kept)]
        )
        held = self._add_up([(layer, count) for _, layer, count in runs])
        passes_s = sum(layer.passes_s * count for _, layer, count in runs)
        # Copies slow passes down: what stands beside the loss does not.
        waits_s = (self._profile.slowdown - 1) * passes_s if held.store_bytes else 0.0
        least_s = self._head_s + passes_s + waits_s
        layers = tuple((layer, count) for layer, _, count in runs)
        return Candidate(layers, self._has_block_loss, held, least_s)


def _distinct(ways: list[Way]) -> list[Way]:
    """The ways in their order, each once."""
    return [way for number, way in enumerate(ways) if way not in ways[:number]]


def _aligned(plans: list[list[LayerPlan]]) -> list[Way]:
    """Ways from each kind's plans: a kind with fewer stays at its last."""
    count = max(map(len, plans))
    return [tuple(one[min(number, len(one) - 1)] for one in plans) for number in range(count)]


def _restored(layer: LayerProfile) -> list[LayerPlan]:
    """What a layer may keep while all else is computed again, and last everything."""
    names = [item.name for item in layer.items]
    if not layer.can_replay or not layer.saved_bytes:
        return [LayerPlan()]
    kept = [frozenset(names[: num + 1]) for num in range(len(names))]
    return [*(LayerPlan(mode="restore", resident=one) for one in kept), LayerPlan()]


def _tiled(layer: LayerProfile) -> list[LayerPlan]:
    """What a layer by tiles may keep."""
    assert layer.tiles is not None
    return [
        LayerPlan(mode="tiles", tile_rows=layer.tiles.tile_rows, resident=frozenset(kept))
        for kept in ([INPUT], [INPUT, ATTENTION])
    ]


def _stored(layer: LayerProfile, *, has_tiles: bool) -> list[LayerPlan]:
    """What a layer may store: the first items whole, and a fraction of the next; empty where it saves nothing."""
    if not layer.saved_bytes:
        return []
    if not layer.can_replay:
        return [LayerPlan(mode="whole")]
    if has_tiles and layer.tiles is not None:
        rows = layer.tiles.tile_rows
        kept = ([INPUT], [INPUT, ATTENTION])
        return [
            LayerPlan(mode="tiles", tile_rows=rows, stored=dict.fromkeys(one, 1.0)) for one in kept
        ]
    names, plans = [item.name for item in layer.items], []
    for num, name in enumerate(names):
        for fraction in (0.0,) if name in (INPUT, ATTENTION) else _FRACTIONS:
            if num == 0 and fraction == 0.0:
                continue
            stored = dict.fromkeys(names[:num], 1.0)
            if fraction:
                stored[name] = fraction
            plans.append(LayerPlan(mode="restore", stored=stored))
    return [*plans, LayerPlan(mode="restore", stored=dict.fromkeys(names, 1.0))]
