"""How good plans turned out to be: divergence and seconds, measured beside what was predicted."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from torch import Tensor, nn

from llmpq.planner.explanation import PlanResult
from llmpq.planner.plan import Plan
from llmpq.planner.problem import InfeasiblePlan
from llmpq.profiler.cluster_profile import merge_mappings
from llmpq.profiler.sensitivity import divergence, predict, read_batches, round_to_nearest
from llmpq.runtime.pipeline import Pipeline
from shared.comms import Group, tree
from shared.errors import ConfigError

__all__ = [
    "NoiseCheck",
    "StageTiming",
    "Timing",
    "check_noise",
    "compare_plans",
    "draw_mixtures",
    "kl_divergence",
    "plan_as_measured",
    "rank_correlation",
]


# Plans that are tried until one keeps its limit where it is measured: each loads the whole model.
_MOST_PLANS = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class NoiseCheck:
    """One mixture of widths, predicted and measured.

    Attributes:
        bits: width of each layer.
        predicted: sum of the layers' noise, nats a token.
        measured: divergence of the model so rounded, nats a token.
    """

    bits: tuple[int, ...]
    predicted: float
    measured: float


def kl_divergence(model: nn.Module, reference: nn.Module, batches: Iterable[Any]) -> float:
    """Mean divergence of `model`'s next-token distribution from `reference`'s, in nats a token.

    Args:
        model: a rounded model, as `load` returns.
        reference: the unquantised one.
        batches: token ids [sequences, tokens], or mappings with `input_ids` and perhaps an
            `attention_mask`; other text than that which sensitivity was measured on.

    Raises:
        DataError: there are no tokens.
    """
    found = read_batches(batches)
    return divergence(model, found, predict(reference, found))


def plan_as_measured(
    choose: Callable[[np.ndarray], PlanResult],
    noise: np.ndarray,
    max_kl: float,
    measure: Callable[[Plan], float],
) -> tuple[PlanResult, float]:
    """A plan whose measured loss keeps the limit too, not only the sum of its layers' noise.

    A sum of noise holds to second order: many layers of few bits together lose more. Where a plan's
    measured loss is above the limit, all noise is raised by as much as this plan exceeded what was
    expected of it, and the next plan is made with that.

    Args:
        choose: makes a plan from noise [layer, width] in nats a token, within the limit.
        noise: as `sensitivity` measured it.
        max_kl: the limit, in nats a token.
        measure: a plan's loss in nats a token, on text that noise was not measured on.

    Returns:
        The plan, its `nats` expected of the noise it was made with, and its measured loss.

    Raises:
        InfeasiblePlan: no plan keeps the limit as expected, or none of those tried as measured.
    """
    tried = []
    for _ in range(_MOST_PLANS):
        result = choose(noise)
        measured = measure(result.plan)
        if measured <= max_kl:
            return result, measured
        tried.append(measured)
        if not result.nats > 0:
            break
        noise = noise * (measured / result.nats)
    raise InfeasiblePlan(
        f"expected a plan that loses at most {max_kl:.4g} nats a token as measured, got "
        f"{', '.join(f'{one:.4g}' for one in tried)}; allow more loss, or give more prompts to measure "
        "sensitivity on"
    )


def check_noise(
    model: nn.Module,
    batches: Iterable[Any],
    noise: np.ndarray,
    mixtures: Sequence[Sequence[int]],
    *,
    bits: Sequence[int],
    group_size: int = 128,
) -> list[NoiseCheck]:
    """Measures mixtures of widths, rounded to nearest, beside what their noise adds up to.

    Args:
        model: the unquantised model; its weights are put back.
        batches: as in `kl_divergence`.
        noise: [layer, width], nats a token.
        mixtures: widths of the layers, one sequence a mixture.
        bits: width of each column of `noise`.
        group_size: columns that share a scale.

    Raises:
        ConfigError: a mixture has a width that `bits` lacks.
        DataError: there are no tokens.
    """
    found = read_batches(batches)
    expected = predict(model, found)
    checks = []
    for number, mixture in enumerate(mixtures):
        if len(mixture) != len(noise) or not set(mixture) <= set(bits):
            raise ConfigError(
                f"mixtures[{number}]: expected {len(noise)} widths of {list(bits)}, got "
                f"{list(mixture)}"
            )
        predicted = sum(
            float(row[list(bits).index(width)]) for row, width in zip(noise, mixture, strict=True)
        )
        with round_to_nearest(model, mixture, group_size=group_size):
            measured = divergence(model, found, expected)
        checks.append(NoiseCheck(bits=tuple(mixture), predicted=predicted, measured=measured))
    return checks


def draw_mixtures(
    noise: np.ndarray, targets: Sequence[float], *, bits: Sequence[int], seed: int = 0
) -> list[tuple[int, ...]]:
    """Random mixtures whose noise adds up to about each target, from below.

    Args:
        noise: [layer, width], nats a token.
        targets: nats a token.
        bits: width of each column of `noise`.
        seed: of the draws.
    """
    draws = np.random.default_rng(seed)
    order = np.argsort(-np.asarray(bits))  # from the widest, which is the least noisy
    mixtures = []
    for target in targets:
        place = np.zeros(len(noise), dtype=int)
        total = float(noise[:, order[0]].sum())
        stuck = 0
        while stuck < 4 * len(noise):
            layer = int(draws.integers(len(noise)))
            stuck += 1
            if place[layer] + 1 == len(order):
                continue
            now, then = noise[layer, order[place[layer] + np.arange(2)]]
            if total + then - now <= target:
                total += float(then - now)
                place[layer] += 1
                stuck = 0
        mixtures.append(tuple(int(bits[order[number]]) for number in place))
    return mixtures


def rank_correlation(first: ArrayLike, second: ArrayLike) -> float:
    """Spearman's correlation of ranks; equal values share their mean rank.

    Raises:
        ConfigError: lengths differ, or there are fewer than two different values.
    """
    both = np.asarray(first), np.asarray(second)
    if both[0].shape != both[1].shape or any(len(np.unique(values)) < 2 for values in both):
        raise ConfigError(
            f"expected two sequences of one length, each with at least two different values, got "
            f"shapes {both[0].shape} and {both[1].shape}"
        )
    ranks = []
    for values in both:
        _, number, count = np.unique(values, return_inverse=True, return_counts=True)
        ranks.append((count.cumsum() - (count - 1) / 2)[number])
    return float(np.corrcoef(np.stack(ranks))[0, 1])


@dataclass(frozen=True, kw_only=True, slots=True)
class StageTiming:
    """Seconds of one micro-batch on a stage, the first one's with embedding, head and sampling.

    Attributes:
        rank: the stage's rank.
        layers: first layer and the one after the last.
        prefill_s, decode_s: median over micro-batches and turns; 0 where there was none.
        predicted_prefill_s, predicted_decode_s: as the plan says; None if it does not.
    """

    rank: int
    layers: tuple[int, int]
    prefill_s: float
    decode_s: float
    predicted_prefill_s: float | None
    predicted_decode_s: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """A plan's turns on one batch.

    Attributes:
        name: of the plan.
        turns_s: seconds of each turn, on rank 0.
        num_tokens: new tokens of all prompts together.
        predicted_s: seconds that the plan says; None if it does not.
        stages: in pipeline order.
        tokens: new tokens of the last turn [prompts, new tokens].
    """

    name: str
    turns_s: tuple[float, ...]
    num_tokens: int
    predicted_s: float | None
    stages: tuple[StageTiming, ...]
    tokens: Tensor | None = None

    @property
    def median_s(self) -> float:
        """Median seconds of a turn."""
        return median(self.turns_s)

    @property
    def tokens_per_s(self) -> float:
        """New tokens a second, of all prompts together."""
        return self.num_tokens / self.median_s


def compare_plans(
    plans: Mapping[str, Plan],
    folder: str | Path,
    ids: Tensor,
    mask: Tensor,
    *,
    new_tokens: int,
    rounds: int = 3,
) -> list[Timing]:
    """Answers one batch by several plans in turns; every rank of the world calls it alike.

    The stages of all plans are loaded at once, so that turns can alternate: a rank needs memory for
    its part of each. One turn of every plan goes before those that are timed.

    Args:
        plans: by name.
        folder: the model.
        ids, mask: prompts [prompts, tokens], as `Pipeline.generate` takes them.
        new_tokens: tokens of each answer; answers do not end before.
        rounds: timed turns of each plan.

    Returns:
        A timing of each plan, in their order, on rank 0; an empty list elsewhere.

    Raises:
        ConfigError: there are no plans or no rounds, or a plan is of another model or more ranks.
        CommError: a rank died or stands still; names it.
    """
    if not plans or rounds < 1:
        raise ConfigError(f"expected a plan and a round, got {len(plans)} plans, {rounds} rounds")
    control = Group.control()
    turns: dict[str, list[float]] = {name: [] for name in plans}
    spent: dict[str, list[dict[str, Any]]] = {name: [] for name in plans}
    tokens: dict[str, Tensor | None] = {}
    with ExitStack() as stack:
        pipes = {name: stack.enter_context(Pipeline(plan, folder)) for name, plan in plans.items()}
        for turn in range(rounds + 1):
            for name, pipe in pipes.items():
                begun = time.perf_counter()
                tokens[name] = pipe.generate(ids, mask, max_new_tokens=new_tokens)
                seconds = time.perf_counter() - begun
                # Rank 0 waits here for all others, so that none is late for the next turn.
                mine = json.dumps({str(control.rank): asdict(pipe.stage_s)}).encode()
                gathered = tree.gather(control, mine, merge_mappings)
                if turn and gathered is not None:
                    turns[name].append(seconds)
                    spent[name].append(json.loads(gathered))
    if control.rank:
        return []
    return [
        Timing(
            name=name,
            turns_s=tuple(turns[name]),
            num_tokens=len(ids) * new_tokens,
            predicted_s=plan.predicted.get("seconds"),
            stages=_stage_timings(plan, spent[name]),
            tokens=tokens[name],
        )
        for name, plan in plans.items()
    ]


def _stage_timings(plan: Plan, spent: Sequence[Mapping[str, Any]]) -> tuple[StageTiming, ...]:
    def typical(rank: int, part: str) -> float:
        found = [seconds for turn in spent for seconds in turn[str(rank)][part]]
        return median(found) if found else 0.0

    def predicted(part: str, number: int) -> float | None:
        known = plan.predicted.get(part)
        return None if known is None else float(known[number])

    return tuple(
        StageTiming(
            rank=stage.rank,
            layers=stage.layers,
            prefill_s=typical(stage.rank, "prefill") + typical(stage.rank, "head_prefill"),
            decode_s=typical(stage.rank, "decode") + typical(stage.rank, "head_decode"),
            predicted_prefill_s=predicted("stage_prefill_s", number),
            predicted_decode_s=predicted("stage_decode_s", number),
        )
        for number, stage in enumerate(plan.stages)
    )
