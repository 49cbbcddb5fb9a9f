"""Plans worth looking at: layers come in up to three runs, in the order of the forward.

The first ones store items, the next ones keep items on the device, and the last ones keep all that
autograd saves. Which items are there goes by the seconds that a byte saves, which is optimal for one
limit (after the linear program of MEMO, arXiv 2407.12117, as a fractional knapsack). Plans that share
all but how many layers the second run has are a family: its fastest that fits is found by bisection.

Layers by tiles and a loss in blocks round otherwise than plain training, so that plans with them are looked
at apart.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from memo.config import Budget
from memo.planner.footprint import Footprint, LayerFootprint, add_up, layer_footprint
from memo.planner.layer_plan import ATTENTION, INPUT, LayerPlan
from memo.planner.plan import Plan
from memo.planner.profile import StepProfile

__all__ = ["Candidate", "Candidates", "Family"]

_FRACTIONS = (0.0, 0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875)


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
        first, second: the ways.
        num_kept: layers that keep all.
        least_s: no plan of it is faster.
    """

    first: LayerPlan
    second: LayerPlan
    num_kept: int
    least_s: float


class Candidates:
    """Plans within a budget, fast ones first."""

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
            has_tiles: whether all layers that are not kept go by tiles, which the profile then has.
        """
        self._profile, self._budget = profile, budget
        self._has_block_loss = has_block_loss
        self._store_limit = budget.store_bytes if profile.send is not None else 0
        self._keep = LayerPlan()
        names = [item.name for item in profile.layer.items]
        if profile.layer.can_replay:
            self._second_ways = [
                LayerPlan(mode="restore", resident=frozenset(names[: num + 1]))
                for num in range(len(names))
            ] + [self._keep]
            self._first_ways = [
                *(_stored(names) if self._store_limit else ()),
                self._second_ways[0],
            ]
        else:
            self._second_ways = [self._keep]
            self._first_ways = [LayerPlan(mode="whole") if self._store_limit else self._keep]
        if has_tiles:
            assert profile.layer.tiles is not None
            self._first_ways = list(
                _tiled(profile.layer.tiles.tile_rows, has_store=self._store_limit > 0)
            )
            self._second_ways = [
                *(one for one in self._first_ways if not one.has_stored),
                self._keep,
            ]
        # The ways live as long as this does: they are told apart by where they are.
        plan = Plan(layers=(self._keep,))
        self._rules = {"num_buffers": plan.num_buffers, "max_sending": plan.max_sending}
        self._held: dict[int, LayerFootprint] = {
            id(one): layer_footprint(one, profile, plan.cut)
            for one in (*self._first_ways, *self._second_ways, self._keep)
        }

    def fits(self, held: Footprint) -> bool:
        """Whether both limits hold."""
        return (
            held.peak_bytes <= self._budget.device_bytes and held.store_bytes <= self._store_limit
        )

    def smallest(self) -> Footprint:
        """The step that takes fewest bytes of those whose layers all go one way."""
        count = self._profile.num_layers
        steps = [self._add_up([(layer, count)]) for layer in self._held.values()]
        return min(steps, key=lambda one: one.peak_bytes)

    def families(self) -> list[Family]:
        """Those that may fit, by their least seconds."""
        fitting = {key for key, layer in self._held.items() if self._fits_alone(layer)}
        return sorted(self._families(fitting), key=lambda one: one.least_s)

    def _fits_alone(self, layer: LayerFootprint) -> bool:
        """Whether a step of one such layer fits, as it must where there are more."""
        return self.fits(self._add_up([(layer, 1)]))

    def _families(self, fitting: set[int]) -> Iterator[Family]:
        """Those of which at least one way is among the fitting ones."""
        count = self._profile.num_layers
        numbers = range(count, -1, -max(1, count // 16))
        if id(self._keep) not in fitting:
            numbers = range(1)
        for first in self._first_ways:
            for second in self._second_ways:
                if not fitting & {id(first), id(second)}:
                    continue
                # Where the second run keeps all too, its number is found exactly.
                for num_kept in (0,) if second is self._keep else numbers:
                    yield Family(first, second, num_kept, self._least_s(first, second, num_kept))

    def _least_s(self, first: LayerPlan, second: LayerPlan, num_kept: int) -> float:
        """No plan of such a family is faster."""
        more = min(self._more_s(first), self._more_s(second))
        return self._plain_s() + (self._profile.num_layers - num_kept) * more

    def _more_s(self, way: LayerPlan) -> float:
        """Seconds of a layer beyond those of a kept one."""
        held = self._held[id(way)]
        return held.forward_s - self._profile.layer.forward_s + held.replay_s

    def _plain_s(self) -> float:
        layer, profile = self._profile.layer, self._profile
        head_s = profile.block_head_s if self._has_block_loss else profile.head_s
        return profile.num_layers * (layer.forward_s + layer.backward_s) + (head_s or 0.0)

    def of(self, family: Family) -> Iterator[Candidate]:
        """Plans of a family: with as many layers of the second run as fit, and with as few or all."""
        high = self._profile.num_layers - family.num_kept
        stored = self._held[id(family.first)].stored_bytes
        # The store holds so many of the first run, and the second stores nothing.
        low = max(0, high - self._store_limit // stored) if stored else 0
        found = self._candidate(family, low)
        if not self.fits(found.held):
            # More layers on the device may still spare buffers and store, but only all of them do.
            yield found
            yield self._candidate(family, high)
            return
        yield found
        while low < high:  # more layers that keep items take more bytes and fewer seconds
            middle = (low + high + 1) // 2
            one = self._candidate(family, middle)
            if self.fits(one.held):
                low, found = middle, one
            else:
                high = middle - 1
        yield found

    def _add_up(self, runs: list[tuple[LayerFootprint, int]]) -> Footprint:
        return add_up(runs, self._profile, has_block_loss=self._has_block_loss, **self._rules)

    def _candidate(self, family: Family, num_second: int) -> Candidate:
        num_first = self._profile.num_layers - family.num_kept - num_second
        runs = [
            (family.first, num_first),
            (family.second, num_second),
            (self._keep, family.num_kept),
        ]
        runs = [(way, count) for way, count in runs if count]
        held = self._add_up([(self._held[id(way)], count) for way, count in runs])
        more_s = sum(self._more_s(way) * count for way, count in runs)
        layer = self._profile.layer
        # Copies slow passes down: what stands beside the loss does not.
        passes_s = self._profile.num_layers * (layer.forward_s + layer.backward_s) + more_s
        waits_s = (self._profile.slowdown - 1) * passes_s if held.store_bytes else 0.0
        least_s = self._plain_s() + more_s + waits_s
        return Candidate(tuple(runs), self._has_block_loss, held, least_s)


def _tiled(tile_rows: int, *, has_store: bool) -> Iterator[LayerPlan]:
    """What a layer by tiles may keep or store."""
    for kept in ([INPUT], [INPUT, ATTENTION]):
        yield LayerPlan(mode="tiles", tile_rows=tile_rows, resident=frozenset(kept))
        if has_store:
            yield LayerPlan(mode="tiles", tile_rows=tile_rows, stored=dict.fromkeys(kept, 1.0))


def _stored(names: list[str]) -> Iterator[LayerPlan]:
    """What a layer may store: the first items whole, and a fraction of the next."""
    for num in range(len(names)):
        for fraction in (0.0,) if names[num] in (INPUT, ATTENTION) else _FRACTIONS:
            if num == 0 and fraction == 0.0:
                continue
            stored = dict.fromkeys(names[:num], 1.0)
            if fraction:
                stored[names[num]] = fraction
            yield LayerPlan(mode="restore", stored=stored)
    yield LayerPlan(mode="restore", stored=dict.fromkeys(names, 1.0))
