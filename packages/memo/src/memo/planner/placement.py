"""Chooses what each layer keeps, stores and computes again: the fastest plan within hard limits.

Layers come in up to three runs, in the order of the forward: the first ones store items, the next
ones keep items on the device, and the last ones keep all that autograd saves. Which items are there
goes by the seconds that a byte saves, which is optimal for one limit (after the linear program of
MEMO, arXiv 2407.12117, as a fractional knapsack).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Protocol

from memo.config import Budget, DoesNotFit
from memo.planner.footprint import Footprint, footprint
from memo.planner.layer_plan import LayerPlan
from memo.planner.plan import Plan
from memo.planner.profile import StepProfile
from shared.units import format_bytes

__all__ = ["Predicted", "place"]


class Predicted(Protocol):
    """What a replay of a plan says, see `memo.simulator.Prediction`."""

    step_s: float
    peak_bytes: int
    store_bytes: int
    exposed_s: float
    replayed_s: float


_FRACTIONS = (0.0, 0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875)


@dataclass(frozen=True, slots=True)
class _Candidate:
    plan: Plan
    held: Footprint
    least_s: float
    """Seconds without any wait: no replay is faster."""


def place(
    profile: StepProfile,
    budget: Budget,
    store: str,
    *,
    predict: Callable[[Plan, StepProfile], Predicted],
) -> Plan:
    """The fastest plan within a budget, with its prediction.

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
    limit = budget.store_bytes if profile.send is not None else 0
    candidates = [
        one
        for has_block_loss in _losses(profile)
        for one in _candidates(profile, budget, store, limit, has_block_loss)
    ]
    fitting = [one for one in candidates if _fits(one.held, budget, limit)]
    if not fitting:
        raise DoesNotFit(_missing(profile, budget, min(candidates, key=_bytes).held))
    best: tuple[float, int, _Candidate, Predicted] | None = None
    for number, one in enumerate(sorted(fitting, key=lambda one: one.least_s)):
        if best is not None and one.least_s >= best[0]:
            break
        prediction = predict(one.plan, profile)
        if best is None or prediction.step_s < best[0]:
            best = prediction.step_s, number, one, prediction
    assert best is not None
    return _described(best[2], best[3], profile)


def _losses(profile: StepProfile) -> tuple[bool, ...]:
    return (False,) if profile.block_head_bytes is None else (False, True)


def _fits(held: Footprint, budget: Budget, store_limit: int) -> bool:
    return held.peak_bytes <= budget.device_bytes and held.store_bytes <= store_limit


def _bytes(candidate: _Candidate) -> int:
    return candidate.held.peak_bytes


def _candidates(
    profile: StepProfile, budget: Budget, store: str, store_limit: int, has_block_loss: bool
) -> Iterator[_Candidate]:
    names = [item.name for item in profile.layer.items]
    count = profile.num_layers
    base = Plan(
        layers=(LayerPlan(),),
        store=store,
        store_limit_bytes=store_limit or None,
        has_block_loss=has_block_loss,
    )
    keep = LayerPlan()
    ways = {
        "resident": [
            LayerPlan(mode="restore", resident=frozenset(names[: num + 1]))
            for num in range(len(names))
        ],
        "stored": [] if not store_limit else list(_stored(names)),
    }
    yield _candidate(base, profile, [keep] * count)
    if not profile.layer.can_replay:
        if store_limit:
            whole = LayerPlan(mode="whole")
            for num in range(1, count + 1):
                yield _candidate(base, profile, [whole] * num + [keep] * (count - num))
        return
    for first in [*ways["stored"], ways["resident"][0]]:
        for second in ways["resident"]:
            yield from _fill(base, profile, budget, store_limit, (first, second, keep))


def _stored(names: list[str]) -> Iterator[LayerPlan]:
    """What a layer may store: the first items whole, and a fraction of the next."""
    for num in range(len(names)):
        for fraction in _FRACTIONS if num > 1 or names[num] not in ("input", "attention") else (0.0,):
            if num == 0 and fraction == 0.0:
                continue
            stored = dict.fromkeys(names[:num], 1.0)
            if fraction:
                stored[names[num]] = fraction
            yield LayerPlan(mode="restore", stored=stored)
    yield LayerPlan(mode="restore", stored=dict.fromkeys(names, 1.0))


def _fill(
    base: Plan,
    profile: StepProfile,
    budget: Budget,
    store_limit: int,
    ways: tuple[LayerPlan, LayerPlan, LayerPlan],
) -> Iterator[_Candidate]:
    """For some numbers of layers kept as they are, as many as fit keep items; the rest goes the first way."""
    first, second, keep = ways
    count = profile.num_layers
    for num_kept in range(count, -1, -max(1, count // 16)):

        def plan(num_second: int, num_kept: int = num_kept) -> _Candidate:
            num_first = count - num_kept - num_second
            return _candidate(
                base, profile, [first] * num_first + [second] * num_second + [keep] * num_kept
            )

        low, high = 0, count - num_kept
        found = plan(low)
        if not _fits(found.held, budget, store_limit):
            # More layers on the device may still spare buffers and store, but only all of them do.
            yield plan(high)
            continue
        while low < high:  # more layers that keep items take more bytes and fewer seconds
            middle = (low + high + 1) // 2
            one = plan(middle)
            if _fits(one.held, budget, store_limit):
                low, found = middle, one
            else:
                high = middle - 1
        yield found
        yield plan(0)


def _candidate(base: Plan, profile: StepProfile, layers: list[LayerPlan]) -> _Candidate:
    plan = replace(base, layers=tuple(layers))
    held = footprint(plan, profile)
    slow = profile.slowdown if held.store_bytes else 1.0
    passes = profile.layer.forward_s + profile.layer.backward_s
    head_s = profile.block_head_s if plan.has_block_loss else profile.head_s
    least = sum((passes + layer.replay_s) * slow for layer in held.layers) + (head_s or 0.0)
    return _Candidate(plan, held, least)


def _described(one: _Candidate, prediction: Predicted, profile: StepProfile) -> Plan:
    layer = profile.layer
    plain_s = profile.num_layers * (layer.forward_s + layer.backward_s) + profile.head_s
    again_s = plain_s + profile.num_layers * layer.replay_at_s(1)
    return replace(
        one.plan,
        prediction={
            "step_s": prediction.step_s,
            "peak_bytes": prediction.peak_bytes,
            "peak_at": one.held.peak_at,
            "parts_bytes": dict(one.held.parts),
            "store_bytes": prediction.store_bytes,
            "exposed_s": prediction.exposed_s,
            "replayed_s": prediction.replayed_s,
            "kept_s": plain_s,
            "recomputed_s": again_s,
            "num_tokens": profile.num_tokens,
            "item_bytes": {item.name: item.num_bytes for item in layer.items},
            "saved_bytes": layer.saved_bytes,
            "details": dict(profile.details or {}),
        },
    )


def _missing(profile: StepProfile, budget: Budget, least: Footprint) -> str:
    short = least.peak_bytes - budget.device_bytes
    per_token = (least.peak_bytes - profile.fixed_bytes) / max(profile.num_tokens, 1)
    room = (budget.device_bytes - profile.fixed_bytes) / per_token if per_token > 0 else 0
    advice = (
        f"a batch of about {int(room):,} tokens may fit"
        if room >= 1
        else "parameters, gradients and optimizer states alone take more: shard them"
    )
    more = "" if budget.store_bytes else ", a store (Budget(store=...)) takes activations off the device"
    return (
        f"expected at most {format_bytes(budget.device_bytes)} on the device, got "
        f"{format_bytes(least.peak_bytes)} for {profile.num_tokens:,} tokens under the plan that takes least "
        f"({format_bytes(max(short, 0))} too many, in the {least.peak_at}); {advice}{more}"
    )
