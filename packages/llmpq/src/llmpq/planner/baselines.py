"""What others do, planned on the same costs: even split, PipeEdge's partition, adaptive bits alone.

Each baseline takes its best width, order and micro-batches under the same memory and quality, so
that a comparison measures joint planning and nothing else.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np

from llmpq.config import ModelSpec, Quality, Workload
from llmpq.planner import BASELINES
from llmpq.planner.candidates import Candidates
from llmpq.planner.costs import Costs
from llmpq.planner.explanation import PlanResult
from llmpq.planner.heuristic import improve, round_counts
from llmpq.planner.problem import InfeasiblePlan, Problem, Solution
from llmpq.planner.search import Found, make_result, plan

__all__ = ["adabits", "even", "pipeedge", "plan_all", "plan_baseline"]

_Placement = tuple[np.ndarray, np.ndarray]
_Known = dict[tuple[float, ...], list[_Placement]]


def plan_baseline(
    name: str,
    model: ModelSpec,
    costs: Costs,
    noise: np.ndarray,
    workload: Workload,
    quality: Quality,
    *,
    bits: Sequence[int],
    group_size: int = 128,
    dtype: str = "float32",
    formula: str = "ring",
) -> PlanResult:
    """The best plan of a baseline over widths, orders and micro-batches; arguments as of `plan`.

    Raises:
        InfeasiblePlan: the baseline finds nothing within memory and quality.
        ConfigError: an unknown name, or a setting outside its range.
    """
    place = BASELINES.get(name)
    candidates = Candidates(
        model=model,
        costs=costs,
        noise=np.asarray(noise, dtype=float),
        workload=workload,
        quality=quality,
        bits=tuple(bits),
        group_size=group_size,
        dtype=dtype,
        formula=formula,
    )
    best: Found | None = None
    known: dict[tuple[float, ...], list[_Placement]] = {}
    for sizes in candidates.sizes():
        for order in candidates.orders:
            problem = candidates.problem(order, sizes)
            for placed in place(problem, known):
                if not problem.is_feasible(*placed):
                    continue
                objective = problem.objective(*placed)
                if best is None or objective < best.solution.objective:
                    solution = Solution(
                        bounds=tuple(placed[0].tolist()),
                        choice=tuple(placed[1].tolist()),
                        objective=objective,
                        lower_bound=0.0,
                        target_gap=0.0,
                    )
                    best = Found(order=order, sizes=sizes, problem=problem, solution=solution)
    if best is None:
        raise InfeasiblePlan(
            f"{name}: expected a plan within memory and a loss of {quality.max_kl} nats at a width "
            f"of {candidates.bits}, got none; allow more loss, or plan jointly"
        )
    return make_result(candidates, best, name)


def plan_all(
    model: ModelSpec,
    costs: Costs,
    noise: np.ndarray,
    workload: Workload,
    quality: Quality,
    *,
    names: Iterable[str] = BASELINES,
    **settings: Any,
) -> dict[str, PlanResult]:
    """The plan, under the name "plan", and those of the baselines that find one.

    Args:
        names: baselines, all by default.
        model, costs, noise, workload, quality, **settings: as of `plan`.

    Raises:
        InfeasiblePlan: not even the joint plan keeps within memory and quality.
    """
    given = (model, costs, noise, workload, quality)
    found = {"plan": plan(*given, **settings)}
    for name in names:
        with suppress(InfeasiblePlan):
            found[name] = plan_baseline(name, *given, **settings)
    return found


def even(problem: Problem, known: _Known) -> list[_Placement]:
    """As many layers on each device as on any other, one width everywhere."""
    bounds = np.arange(problem.num_devices + 1) * problem.num_layers // problem.num_devices
    return [(bounds, _uniform(problem, width)) for width in range(problem.num_widths)]


def _uniform(problem: Problem, width: int) -> np.ndarray:
    return np.full(problem.num_layers, width)


def pipeedge(problem: Problem, known: _Known) -> list[_Placement]:
    """The partition whose slowest stage is fastest, within memory, at one width.

    After PipeEdge (arXiv 2110.14895): dynamic programming over layers and devices in order. The
    time of a stage is that of a batch in both phases.
    """
    placements = []
    rounds = problem.num_decode * (problem.new_tokens - 1)
    for width in range(problem.num_widths):
        seconds = problem.num_prefill * problem.prefill_s[..., width]
        seconds = seconds + rounds * problem.decode_s[..., width]
        bounds = _partition(problem, seconds, problem.layer_bytes[:, width])
        if bounds is not None:
            placements.append((bounds, _uniform(problem, width)))
    return placements


def _partition(problem: Problem, seconds: np.ndarray, held: np.ndarray) -> np.ndarray | None:
    """Bounds with the least largest sum of `seconds` [layer, device], or None if none fit."""
    layers, devices = problem.num_layers, problem.num_devices
    passed = np.concatenate((np.zeros((1, devices)), np.cumsum(seconds, axis=0)))
    filled = np.concatenate(([0.0], np.cumsum(held)))
    number = np.arange(layers + 1)
    slowest = np.full(layers + 1, np.inf)
    slowest[0] = 0.0
    starts = np.zeros((devices, layers + 1), dtype=int)
    for j in range(devices):
        room = problem.memory_bytes[j] - (problem.ends_bytes if j == 0 else 0.0)
        stage = passed[None, :, j] - passed[:, None, j]
        fits = (number[None] >= number[:, None]) & (filled[None] - filled[:, None] <= room)
        fits |= number[None] == number[:, None]
        reach = np.where(fits, np.maximum(slowest[:, None], stage), np.inf)
        starts[j] = reach.argmin(axis=0)
        slowest = reach.min(axis=0)
    if np.isinf(slowest[-1]):
        return None
    bounds = np.empty(devices + 1, dtype=int)
    bounds[-1] = layers
    for j in reversed(range(devices)):
        bounds[j] = starts[j, bounds[j + 1]]
    return bounds


def adabits(problem: Problem, known: _Known) -> list[_Placement]:
    """LLM-PQ's adaptive bits: least noise within memory, blind to time."""
    # Memory is rounded down to quarters of a layer: micro-batches whose temporaries hardly differ
    # then share one answer, which fits them all.
    grain = problem.layer_bytes.min() / 4
    room = np.clip(problem.memory_bytes // grain, 0, 4 * problem.num_layers * 16) * grain
    key = tuple(room.tolist())
    if key not in known:
        still = np.zeros_like(problem.prefill_s)
        blind = replace(
            problem,
            prefill_s=still,
            decode_s=still,
            memory_bytes=room,
            theta=1.0,
            max_noise=None,
            prefill_send_s=np.zeros(()),
            decode_send_s=np.zeros(()),
            ends_prefill_s=np.zeros(()),
            ends_decode_s=np.zeros(()),
        )
        widest = np.eye(problem.num_widths)[problem.noise.mean(axis=0).argmin()]
        start = round_counts(blind, np.outer(np.maximum(room, 1.0), widest))
        known[key] = [improve(blind, *start, until=time.perf_counter() + 0.5)]
    return known[key]
