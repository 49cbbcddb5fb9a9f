"""What a plan promises, and what holds it back, in words."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import numpy as np

from llmpq.config import Workload
from llmpq.planner.heuristic import improve
from llmpq.planner.plan import Plan
from llmpq.planner.problem import Problem, Solution

__all__ = ["PlanResult", "explain"]

_MEGABYTE = 1e6


@dataclass(frozen=True, kw_only=True, eq=False)
class PlanResult:
    """A plan, what it is predicted to cost, and how far from the best it can be.

    Attributes:
        plan: who runs what.
        problem: the planning problem of the plan's devices and micro-batches.
        solution: layers and widths in that problem, with the bound over all problems searched.
        order: device of each of the problem's places.
        kinds: kind of each of the problem's places.
        workload: prompts and tokens.
        bits: weight widths that were to choose from.
        method: what made the plan: "plan" or the name of a baseline.
    """

    plan: Plan
    problem: Problem
    solution: Solution
    order: tuple[int, ...]
    kinds: tuple[str, ...]
    workload: Workload
    bits: tuple[int, ...]
    method: str = "plan"

    @property
    def objective(self) -> float:
        """Seconds of the batch plus theta times the expected nats."""
        return self.solution.objective

    @property
    def lower_bound(self) -> float:
        """No plan of those searched has a lower objective; 0 where nothing is proven."""
        return self.solution.lower_bound

    @property
    def gap(self) -> float:
        """Share of the objective by which the optimum may be lower."""
        return self.solution.gap

    @property
    def is_optimal(self) -> bool:
        """Whether the gap that was asked for is proven."""
        return self.solution.is_optimal

    @property
    def seconds(self) -> float:
        """Predicted seconds of the batch."""
        return self.problem.seconds(self.solution.bounds, self.solution.choice)

    @property
    def nats(self) -> float:
        """Expected loss of quality, in nats a token."""
        return self.problem.total_noise(self.solution.choice)

    @property
    def tokens_per_s(self) -> float:
        """Predicted new tokens per second, over all prompts."""
        return self.workload.num_prompts * self.workload.new_tokens / self.seconds

    def explain(self) -> str:
        """Stages, bottleneck, headroom, expected nats, tokens/s, gap, and what would help most."""
        return explain(self)


def explain(result: PlanResult) -> str:
    """Describes a plan as text of several lines, see `PlanResult.explain`."""
    problem, solution = result.problem, result.solution
    prefill_s, decode_s = problem.stage_s(solution.bounds, solution.choice)
    held = problem.used_bytes(solution.bounds, solution.choice)
    used = [j for j in range(problem.num_devices) if solution.bounds[j + 1] > solution.bounds[j]]
    lines = [
        "device  kind            layers      bits            prefill ms  decode ms  memory MB  free"
    ]
    for j in used:
        low, high = solution.bounds[j], solution.bounds[j + 1]
        room = problem.memory_bytes[j]
        free = f"{1 - held[j] / room:.0%}" if np.isfinite(room) and room > 0 else "-"
        lines.append(
            f"{result.order[j]:<6}  {result.kinds[j]:<14}  {f'{low}-{high - 1}':<10}  "
            f"{_widths(result, low, high):<14}  {1e3 * prefill_s[j]:>10.3g}  "
            f"{1e3 * decode_s[j]:>9.3g}  {held[j] / _MEGABYTE:>9.1f}  {free:>4}"
        )
    idle = [str(result.order[j]) for j in range(problem.num_devices) if j not in used]
    if idle:
        lines.append(f"left out: device {', '.join(idle)} (no layer there makes the batch sooner)")
    plan = result.plan
    lines.append(
        f"micro-batches: {plan.prefill_size} prompts in prefill, {plan.decode_size} in decode"
    )
    lines.append(_bottleneck(result, prefill_s, decode_s))
    limit = "" if problem.max_noise is None else f" of {problem.max_noise:.4g} allowed"
    lines.append(f"expected loss: {result.nats:.4g} nats a token{limit}")
    lines.append(
        f"predicted: {result.seconds:.4g} s for a batch of {result.workload.num_prompts} prompts of "
        f"{result.workload.prompt_tokens} tokens, {result.tokens_per_s:.4g} tokens/s"
    )
    if result.lower_bound > 0:
        proven = "" if result.is_optimal else " (the gap asked for is not proven)"
        lines.append(
            f"no plan in the orders of devices that were searched is faster by more than "
            f"{result.gap:.1%}{proven}"
        )
    lines.append(f"what would help most: {_best_help(result, held, used)}")
    return "\n".join(lines)


def _widths(result: PlanResult, low: int, high: int) -> str:
    bits, counts = np.unique(result.plan.bits[low:high], return_counts=True)
    return " ".join(f"{count}x{width}" for width, count in zip(bits, counts, strict=True))


def _bottleneck(result: PlanResult, prefill_s: np.ndarray, decode_s: np.ndarray) -> str:
    problem, bounds = result.problem, result.solution.bounds
    used = np.flatnonzero(np.diff(bounds))
    following = np.roll(used, -1)
    paces = []
    for stage_s, send_s in (
        (prefill_s, problem.prefill_send_s[used, following]),
        (decode_s, problem.decode_send_s[used, following]),
    ):
        device, sender = int(stage_s.argmax()), int(send_s.argmax())
        if send_s[sender] > stage_s[device]:
            one, other = result.order[used[sender]], result.order[following[sender]]
            paces.append((send_s[sender], f"the link from device {one} to {other}"))
        else:
            paces.append((stage_s[device], f"device {result.order[device]}"))
    lap = decode_s.sum() + problem.decode_send_s[used, following].sum()
    in_decode = paces[1][1]
    if used.size > 1 and problem.num_decode * paces[1][0] < lap:
        in_decode = "the way of a token through all stages"
    return f"bottleneck: {paces[0][1]} in prefill, {in_decode} in decode"


def _best_help(result: PlanResult, held: np.ndarray, used: list[int]) -> str:
    """Prices each resource by what the batch would take with the same placement."""
    problem, bounds, choice = result.problem, result.solution.bounds, result.solution.choice
    now = problem.seconds(bounds, choice)
    helps: list[tuple[float, str]] = []
    for j in used:
        prefill_s, decode_s = problem.prefill_s.copy(), problem.decode_s.copy()
        prefill_s[:, j] /= 1.1
        decode_s[:, j] /= 1.1
        faster = replace(problem, prefill_s=prefill_s, decode_s=decode_s).seconds(bounds, choice)
        helps.append((now - faster, f"a device {result.order[j]} that is 10 % faster"))
    if problem.has_sends:
        faster = replace(
            problem,
            prefill_send_s=problem.prefill_send_s / 1.1,
            decode_send_s=problem.decode_send_s / 1.1,
        ).seconds(bounds, choice)
        helps.append((now - faster, "links that are 10 % faster"))
    roomier = replace(problem, memory_bytes=1.1 * problem.memory_bytes)
    helps.append((now - _resolved(roomier, result), "10 % more memory"))
    if problem.max_noise is not None:
        laxer = replace(problem, max_noise=1.1 * problem.max_noise)
        helps.append((now - _resolved(laxer, result), "10 % more loss"))
    gain, text = max(helps)
    return f"{text} ({gain / now:.1%} sooner)" if gain > 1e-3 * now else "nothing single by 0.1 %"


def _resolved(problem: Problem, result: PlanResult) -> float:
    """Seconds after improving the plan under changed limits."""
    start = np.array(result.solution.bounds), np.array(result.solution.choice)
    return problem.seconds(*improve(problem, *start, until=time.perf_counter() + 0.5))
