"""Chooses what each layer keeps, stores and computes again: the fastest plan within hard limits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from math import inf
from typing import Protocol, runtime_checkable

from memo.config import Budget, DoesNotFit
from memo.planner.candidates import Candidate, Candidates
from memo.planner.plan import Plan
from memo.planner.profile import StepProfile
from shared.units import format_bytes

__all__ = ["Predicted", "check_possible", "fits", "place"]

_WORTH = 0.95
"""Of the step's seconds: what rounds otherwise than plain training is chosen if it takes no more."""


_GAIN = 0.98
"""Of the seconds of computing everything again: a plan that takes more is no faster as far as can be measured."""


@runtime_checkable
class Predicted(Protocol):
    """What a replay of a plan says, see `memo.simulator.Prediction`."""

    @property
    def step_s(self) -> float:
        """Seconds of forward and backward."""
        ...

    @property
    def peak_bytes(self) -> int:
        """Most bytes on the device."""
        ...

    @property
    def expected_peak_bytes(self) -> int:
        """The same if copies take as long as they were measured to."""
        ...

    @property
    def store_bytes(self) -> int:
        """Most bytes in the store."""
        ...

    @property
    def exposed_s(self) -> float:
        """Seconds that passes wait for copies."""
        ...

    @property
    def replayed_s(self) -> float:
        """Seconds of what is computed again."""
        ...


def place(
    profile: StepProfile,
    budget: Budget,
    store: str,
    *,
    predict: Callable[[Plan, StepProfile], Predicted],
) -> Plan:
    """The fastest plan within a budget, with its prediction.

    Gradients equal plain training's to the bit while that is possible: a loss in blocks is chosen where
    nothing else fits or the step is faster by a twentieth, and tiles only where nothing else fits. Computing
    everything again is chosen where it fits and nothing is faster by more than a fiftieth.

    Args:
        profile: what a step takes without a plan.
        budget: hard limits of device and store.
        store: "memory", "pinned" or "file:DIR".
        predict: replays a plan: `memo.simulator.simulate`.

    Returns:
        The plan, whose `prediction` has `step_s`, `peak_bytes`, `store_bytes`, and what keeping everything
        and computing everything again would take.

    Raises:
        DoesNotFit: no plan is within the budget; says by how much, and what would help.
    """
    best: tuple[Candidate, Predicted] | None = None
    for alike in _kinds(profile, budget):
        for candidates in alike:
            below_s = inf if best is None else _WORTH * best[1].step_s
            best = _fastest(candidates, below_s, profile, budget, store, predict) or best
        if best is not None:
            break
    if best is None:
        raise DoesNotFit(_missing(profile, budget, "got"))
    again = Candidates(profile, budget).again()
    if again.held.peak_bytes <= budget.device_bytes:
        prediction = predict(again.plan(store, budget), profile)
        if best[1].step_s >= _GAIN * prediction.step_s:
            best = again, prediction
    return _described(best[0], best[0].plan(store, budget), best[1], profile)


def fits(profile: StepProfile, budget: Budget) -> bool:
    """Whether any plan is within a budget, which takes a fraction of the time that `place` takes."""
    return any(
        candidates.fits(one.held)
        for alike in _kinds(profile, budget)
        for candidates in alike
        for family in reversed(candidates.families())  # slow ones take least
        for one in candidates.of(family)
    )


def check_possible(least: StepProfile, budget: Budget) -> None:
    """Refuses a step of which even the least is too much.

    Args:
        least: what each plan takes at least, see `least_layer`.
        budget: hard limits.

    Raises:
        DoesNotFit: no plan is within the budget.
    """
    if not fits(least, budget):
        raise DoesNotFit(_missing(least, budget, "got at least"))


def _kinds(profile: StepProfile, budget: Budget) -> Iterator[list[Candidates]]:
    """Plans without tiles, and then those by tiles; each without a loss in blocks, and then with one."""
    has_block_loss = profile.block_head_s is not None and profile.block_head_bytes is not None
    can_tile = any(kind.tiles is not None for kind in profile.kinds)
    for has_tiles in (False, True) if can_tile else (False,):
        yield [
            Candidates(profile, budget, has_block_loss=has_blocks, has_tiles=has_tiles)
            for has_blocks in ((False, True) if has_block_loss else (False,))
        ]


def _fastest(
    candidates: Candidates,
    below_s: float,
    profile: StepProfile,
    budget: Budget,
    store: str,
    predict: Callable[[Plan, StepProfile], Predicted],
) -> tuple[Candidate, Predicted] | None:
    """The fastest that fits and takes less than so many seconds; None where none does."""
    best: tuple[Candidate, Predicted] | None = None
    for family in candidates.families():
        if family.least_s >= below_s:
            break
        for one in candidates.of(family):
            if not candidates.fits(one.held) or one.least_s >= below_s:
                continue
            prediction = predict(one.plan(store, budget), profile)
            if prediction.step_s < below_s:
                best, below_s = (one, prediction), prediction.step_s
    return best


def _described(one: Candidate, plan: Plan, prediction: Predicted, profile: StepProfile) -> Plan:
    plain_s = profile.passes_s + profile.head_s
    replays_s = (kind.replay_at_s(1) if kind.can_replay else 0.0 for kind in profile.layers)
    largest = max(profile.kinds, key=lambda kind: kind.saved_bytes)
    return replace(
        plan,
        prediction={
            "step_s": prediction.step_s,
            "peak_bytes": prediction.peak_bytes,
            "expected_peak_bytes": prediction.expected_peak_bytes,
            "peak_at": one.held.peak_at,
            "parts_bytes": dict(one.held.parts),
            "store_bytes": prediction.store_bytes,
            "exposed_s": prediction.exposed_s,
            "replayed_s": prediction.replayed_s,
            "kept_s": plain_s,
            "recomputed_s": plain_s + sum(replays_s),
            "num_tokens": profile.num_tokens,
            "item_bytes": {item.name: item.num_bytes for item in largest.items},
            "saved_bytes": largest.saved_bytes,
            "details": dict(profile.details or {}),
        },
    )


def _missing(profile: StepProfile, budget: Budget, got: str) -> str:
    smallest = [one.smallest() for alike in _kinds(profile, budget) for one in alike]
    least = min(smallest, key=lambda one: one.peak_bytes)
    short = least.peak_bytes - budget.device_bytes
    if short <= 0:
        return (
            f"expected at most {format_bytes(budget.store_bytes)} in the store, {got} {format_bytes(least.store_bytes)} "
            f"for {profile.num_tokens:,} tokens under the plan that takes least of the device; give a larger store, "
            f"or more of the device than {format_bytes(budget.device_bytes)}"
        )
    per_token = (least.peak_bytes - profile.fixed_bytes) / max(profile.num_tokens, 1)
    room = (budget.device_bytes - profile.fixed_bytes) / per_token if per_token > 0 else 0
    advice = (
        f"a batch of about {int(room):,} tokens may fit"
        if room >= 1
        else f"{format_bytes(profile.fixed_bytes)} of them are there throughout (parameters, gradients, optimizer "
        "states, the process itself): shard them"
    )
    has_advice = room < 1 or budget.store_bytes > 0
    more = "" if has_advice else ", a store (Budget(store=...)) takes activations off the device"
    return (
        f"expected at most {format_bytes(budget.device_bytes)} on the device, {got} "
        f"{format_bytes(least.peak_bytes)} for {profile.num_tokens:,} tokens under the plan that takes least "
        f"({format_bytes(short)} too many, in the {least.peak_at}); {advice}{more}"
    )
