"""Planning over orders of devices, devices left out, and micro-batches of both phases.

After LLM-PQ (arXiv 2403.01136), which solves a program for each order of the kinds of device and
each prefill micro-batch. Here the decode micro-batch is chosen too, and a small program that bounds
all orders at once rules most micro-batches out before any order is solved.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from llmpq.config import ModelSpec, Quality, Workload
from llmpq.planner.candidates import Candidates
from llmpq.planner.costs import Costs
from llmpq.planner.explanation import PlanResult
from llmpq.planner.heuristic import assign_counts, improve, round_counts
from llmpq.planner.milp import MilpResult, solve_counts, solve_layers
from llmpq.planner.plan import Plan, Stage
from llmpq.planner.problem import InfeasiblePlan, Problem, Solution
from shared.errors import ConfigError

__all__ = ["SOLVERS", "Found", "find_best", "make_result", "plan", "solve"]

SOLVERS = ("auto", "milp", "heuristic")

_EXACT_GAP = 1e-4
"""Gaps below this are left to HiGHS: a cutoff that close to a known plan rules little out."""
_MANY_VARIABLES = 6000
"""Layers x devices x widths above which "auto" is the heuristic."""
_FEW_DEVICES = 8
_HEURISTIC_S = 0.8
"""Seconds for the heuristic at `_USUAL_VARIABLES`, 64 layers x 6 devices x 4 widths."""
_USUAL_VARIABLES = 1536
_TYPICAL_GAP = 1.04
_NUM_RETRIED = 3
_Placement = tuple[np.ndarray, np.ndarray]
_Relaxed = tuple[MilpResult, tuple[int, int], Problem]


def solve(
    problem: Problem, solver: str = "milp", *, gap: float = 0.0, time_limit_s: float = 60.0
) -> Solution:
    """Places layers on devices in the problem's order, and chooses their widths.

    Args:
        problem: times, bytes and noise.
        solver: "milp" proves the gap, or what part of it the time allows; "heuristic" takes a
            fraction of a second and tells the gap to a linear program's bound; "auto" is the one
            that suits the size.
        gap: share of the objective by which the optimum may be lower.
        time_limit_s: seconds that the proof may take; the best plan found by then is returned.

    Raises:
        InfeasiblePlan: nothing keeps within memory and quality; names what is short.
        ConfigError: an unknown solver.
    """
    num_variables = problem.noise.size * problem.num_devices
    solver = _pick_solver(solver, num_variables)
    end = time.perf_counter() + time_limit_s
    relax = solve_counts if problem.has_equal_layers else solve_layers
    relaxed = relax(problem, relaxed=True)
    if np.isinf(relaxed.lower_bound):
        raise InfeasiblePlan(problem.explain_shortage())
    until = min(end, time.perf_counter() + _starts_s(num_variables))
    subsets = solver == "heuristic" and problem.num_devices <= _FEW_DEVICES
    best = _improve_starts(problem, relaxed.held, until=until, subsets=subsets)
    bound = relaxed.lower_bound
    if problem.has_equal_layers and num_variables <= _MANY_VARIABLES:
        left = max(end - time.perf_counter(), 0.1)
        bound = max(bound, solve_layers(problem, relaxed=True, time_limit_s=left).lower_bound)
    objective = problem.objective(*best) if best else np.inf
    left = end - time.perf_counter()
    is_open = solver == "milp" and bound < objective * (1 - gap) and left > 0
    if is_open or best is None:
        cutoff = objective * (1 - gap) if gap >= _EXACT_GAP else np.inf
        exact = solve_layers(problem, gap=gap, time_limit_s=max(left, 1.0), cutoff=cutoff)
        bound = max(bound, exact.lower_bound)
        best = _better(problem, best, _placed(problem, exact))
    if best is None:
        raise InfeasiblePlan(problem.explain_shortage())
    return _solution(problem, best, bound, gap)


def _solution(problem: Problem, best: _Placement, bound: float, gap: float) -> Solution:
    objective = problem.objective(*best)
    return Solution(
        bounds=tuple(best[0].tolist()),
        choice=tuple(best[1].tolist()),
        objective=objective,
        lower_bound=min(bound, objective),
        target_gap=gap,
    )


def _starts_s(num_variables: int) -> float:
    """Seconds that the heuristic may take."""
    return _HEURISTIC_S * max(1.0, num_variables / _USUAL_VARIABLES)


def _pick_solver(solver: str, num_variables: int) -> str:
    if solver not in SOLVERS:
        raise ConfigError(f"solver: expected one of {', '.join(SOLVERS)}, got {solver!r}")
    if solver == "auto":
        return "heuristic" if num_variables > _MANY_VARIABLES else "milp"
    return solver


def _improve_held(
    problem: Problem, held: np.ndarray, *, until: float, pairs: bool = True
) -> _Placement:
    """Improves rounded layers by device and width."""
    return improve(problem, *round_counts(problem, held), until=until, pairs=pairs)


def _improve_starts(
    problem: Problem,
    held: np.ndarray | None,
    *,
    until: float,
    subsets: bool = False,
) -> _Placement | None:
    """Improves the rounded relaxation, or if that ends outside the limits, cruder starts.

    With `subsets`, also starts without one of the devices, and on each one alone: where messages
    are slow, leaving a device out pays only once its last layer has gone.
    """
    devices, widths = problem.num_devices, problem.num_widths
    room = np.clip(problem.memory_bytes, 0.0, 4 * problem.layer_bytes.max() * problem.num_layers)
    room = room if room.any() else np.ones(devices)
    starts = [] if held is None else [held if held.ndim == 2 else held.sum(axis=0)]
    for width in (problem.layer_bytes.mean(axis=0).argmin(), problem.noise.mean(axis=0).argmin()):
        starts.append(np.outer(room, np.eye(widths)[width]))
    best = None
    for number, start in enumerate(starts):
        if number == 0 or best is None or subsets:
            placed = _improve_held(problem, start, until=until)
            best = _better(problem, best, placed)
    if subsets and devices > 1:
        alone = np.eye(devices)[:, :, None] * (starts[0].sum(axis=0) + 1e-3)
        for start in [*(starts[0] * (1 - np.eye(devices)[:, :, None])), *alone]:
            if start.any() and time.perf_counter() < until:
                placed = _improve_held(problem, start, until=until)
                best = _better(problem, best, placed)
    return best


def _placed(problem: Problem, result: MilpResult) -> _Placement | None:
    """The placement that an integer program found, improved where rounding allows."""
    if result.held is None:
        return None
    device = result.held.sum(axis=2).argmax(axis=1)
    number = np.arange(problem.num_devices + 1)
    bounds = np.searchsorted(np.sort(device), number)
    choice = result.held.sum(axis=1).argmax(axis=1)
    if problem.has_equal_layers:
        counts = np.rint(result.held.sum(axis=0)).astype(int)
        if (counts.sum(axis=1) == np.diff(bounds)).all():
            choice = assign_counts(problem, bounds, counts)
    return improve(problem, bounds, choice, until=time.perf_counter() + 1.0)


def _better(
    problem: Problem, one: _Placement | None, other: _Placement | None
) -> _Placement | None:
    if other is None or not problem.is_feasible(*other):
        return one
    if one is None or problem.objective(*other) < problem.objective(*one):
        return other
    return one


@dataclass(frozen=True, kw_only=True, eq=False)
class Found:
    """The best of all candidates: its problem, and the solution with a bound over all."""

    order: tuple[int, ...]
    sizes: tuple[int, int]
    problem: Problem
    solution: Solution


class _Best:
    """The best placement so far, over problems; threads may offer."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.objective = np.inf
        self.found: tuple[tuple[int, ...], tuple[int, int], Problem, _Placement] | None = None

    def offer(
        self,
        order: tuple[int, ...],
        sizes: tuple[int, int],
        problem: Problem,
        placed: _Placement | None,
    ) -> float:
        """Keeps a placement if it is feasible and the best; returns its objective."""
        if placed is None or not problem.is_feasible(*placed):
            return np.inf
        objective = problem.objective(*placed)
        with self._lock:
            if objective < self.objective:
                self.objective = objective
                self.found = order, sizes, problem, placed
        return objective


def plan(
    model: ModelSpec,
    costs: Costs,
    noise: np.ndarray,
    workload: Workload,
    quality: Quality,
    *,
    bits: Sequence[int],
    group_size: int = 128,
    dtype: str = "float32",
    solver: str = "auto",
    formula: str = "ring",
    gap: float = 0.01,
    time_limit_s: float = 20.0,
) -> PlanResult:
    """Chooses widths, split, order of devices and micro-batches of both phases together.

    After LLM-PQ (arXiv 2403.01136), which fixes the decode micro-batch.

    Args:
        model: shape of the model.
        costs: seconds and bytes of the devices, measured or from data sheets.
        noise: expected loss of quality, in nats a token [layer, width]; widths as in `bits`.
        workload: prompts and tokens.
        quality: highest loss, or its price.
        bits: weight widths to choose from.
        group_size: input columns that share a scale.
        dtype: of activations and of weights that are not quantised.
        solver: "milp" proves the gap within the time limit; "heuristic" takes about a second and
            tells its gap; "auto" is the one that suits the size.
        formula: "ring", or "paper" for LLM-PQ's own objective.
        gap: share of the objective by which the optimum may be lower.
        time_limit_s: seconds for the proof.

    Raises:
        InfeasiblePlan: nothing keeps within memory and quality; names what is short.
        ConfigError: a setting outside its range, or a device not measured at a width.
    """
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
    found = find_best(candidates, solver=solver, gap=gap, time_limit_s=time_limit_s)
    return make_result(candidates, found)


def make_result(candidates: Candidates, found: Found, method: str = "plan") -> PlanResult:
    """Writes what was found down as a plan, with what it is predicted to take."""
    problem, solution, order = found.problem, found.solution, found.order
    bounds, choice = solution.bounds, solution.choice
    used = [j for j in range(len(order)) if bounds[j + 1] > bounds[j]]
    following = [*used[1:], used[0]]
    seconds = problem.seconds(bounds, choice)
    prefill_s, decode_s = problem.stage_s(bounds, choice)
    held = problem.used_bytes(bounds, choice)
    workload = candidates.workload
    written = Plan(
        stages=tuple(Stage(rank=order[j], layers=(bounds[j], bounds[j + 1])) for j in used),
        bits=tuple(candidates.bits[width] for width in choice),
        group_size=candidates.group_size,
        prefill_size=found.sizes[0],
        decode_size=found.sizes[1],
        dtype=candidates.dtype,
        model=candidates.model.fingerprint,
        predicted={
            "method": method,
            "seconds": seconds,
            "tokens_per_s": workload.num_prompts * workload.new_tokens / seconds,
            "nats": problem.total_noise(choice),
            "gap": solution.gap,
            "stage_prefill_s": prefill_s[used].tolist(),
            "stage_decode_s": decode_s[used].tolist(),
            "prefill_send_s": problem.prefill_send_s[used, following].tolist(),
            "decode_send_s": problem.decode_send_s[used, following].tolist(),
            "stage_bytes": held[used].tolist(),
            "num_prompts": workload.num_prompts,
            "prompt_tokens": workload.prompt_tokens,
            "new_tokens": workload.new_tokens,
        },
    )
    return PlanResult(
        plan=written,
        problem=problem,
        solution=solution,
        order=order,
        kinds=tuple(candidates.costs.kind(device) for device in order),
        workload=workload,
        bits=candidates.bits,
        method=method,
    )


def find_best(
    candidates: Candidates, *, solver: str = "auto", gap: float = 0.01, time_limit_s: float = 20.0
) -> Found:
    """Searches all orders and micro-batches.

    Args:
        candidates: what to choose from.
        solver: "heuristic", "milp" or "auto", see `solve`.
        gap: share of the objective by which the optimum may be lower.
        time_limit_s: seconds for all; what is not settled by then widens the gap that is told.

    Raises:
        InfeasiblePlan: no candidate keeps within memory and quality; names what is short.
    """
    start = time.perf_counter()
    end = start + time_limit_s
    orders = candidates.orders
    pairs, left_out = [], []
    for sizes in candidates.sizes():
        problem = candidates.problem(orders[0], sizes)
        if len(pairs) > 4 and time.perf_counter() > end:
            left_out.append(_shared_work_s(problem))
        else:
            pairs.append((solve_counts(problem, relaxed=True), sizes, problem))
    pairs.sort(key=lambda pair: pair[0].lower_bound)
    bounds = {sizes: relaxed.lower_bound for relaxed, sizes, _ in pairs}
    if not np.isfinite(min(bounds.values())):
        raise InfeasiblePlan(candidates.explain_shortage(pairs[0][2]))
    num_variables = pairs[0][2].noise.size * len(orders[0])
    solver = _pick_solver(solver, num_variables)
    # A large problem, where nothing will be proven, takes longer; a proof starts from better.
    fast_end = start + _starts_s(num_variables) * (2 if solver == "milp" else 1)
    best = _search_fast(candidates, pairs, end=min(end, fast_end))
    if solver == "milp" or best.found is None:
        bounds = _prove(candidates, pairs, best, gap, end)
    if best.found is None:
        raise InfeasiblePlan(candidates.explain_shortage(pairs[0][2]))
    order, sizes, problem, placed = best.found
    bound = min([*bounds.values(), *left_out])
    return Found(
        order=order, sizes=sizes, problem=problem, solution=_solution(problem, placed, bound, gap)
    )


def _shared_work_s(problem: Problem) -> float:
    """A bound for any order without a program: all work at its fastest, shared evenly by the devices."""
    prefill_s = problem.prefill_s.min(axis=(1, 2)).sum() / problem.num_devices
    decode_s = problem.decode_s.min(axis=(1, 2)).sum() / problem.num_devices
    return problem.num_prefill * prefill_s + (problem.new_tokens - 1) * (
        (problem.num_decode if problem.formula == "ring" else problem.num_decode - 1) * decode_s
    )


def _search_fast(candidates: Candidates, pairs: list[_Relaxed], *, end: float) -> _Best:
    """Improves the relaxation of each pair quickly, then the most promising ones well."""
    best, orders, quick = _Best(), candidates.orders, []
    quick_end = time.perf_counter() + 0.3 * (end - time.perf_counter())
    for relaxed, sizes, problem in pairs:
        if relaxed.lower_bound >= best.objective or (quick and time.perf_counter() > quick_end):
            break
        if relaxed.held is None:
            continue
        placed = _improve_held(problem, relaxed.held, until=end, pairs=False)
        objective = best.offer(orders[0], sizes, problem, placed)
        # Where nothing feasible was found in passing, the bound has to do for a rank.
        quick.append((min(objective, _TYPICAL_GAP * relaxed.lower_bound), relaxed, sizes))
    quick.sort(key=lambda entry: entry[0])
    for _, relaxed, sizes in quick:
        for order in orders:
            if time.perf_counter() > end and best.found is not None:
                return best
            if relaxed.lower_bound >= best.objective:
                break
            problem = candidates.problem(order, sizes)
            placed = _improve_held(
                problem,
                _reorder(relaxed, orders[0], order),
                until=max(end, time.perf_counter() + 0.2),
            )
            best.offer(order, sizes, problem, placed)
    if best.found is None:
        for _, _, sizes in quick[:_NUM_RETRIED]:
            for order in orders[:_NUM_RETRIED]:
                problem = candidates.problem(order, sizes)
                placed = _improve_starts(problem, None, until=time.perf_counter() + 0.5)
                best.offer(order, sizes, problem, placed)
    return best


def _reorder(relaxed: MilpResult, given: Sequence[int], order: Sequence[int]) -> np.ndarray:
    """Counts by device in another order of the devices."""
    assert relaxed.held is not None, "bounded only where layers fit"
    return relaxed.held[[given.index(device) for device in order]]


def _prove(
    candidates: Candidates, pairs: list[_Relaxed], best: _Best, gap: float, end: float
) -> dict[object, float]:
    """Raises the bound of each pair, then of each of its orders, to the gap from the best.

    Programs are solved side by side, as HiGHS leaves the interpreter to other threads.
    """

    def bound_all_orders(pair: _Relaxed) -> float:
        relaxed, _, problem = pair
        left = end - time.perf_counter()
        if relaxed.lower_bound >= best.objective * (1 - gap) or left <= 0:
            return relaxed.lower_bound
        counted = solve_counts(problem, gap=gap / 4, time_limit_s=min(left, 3.0))
        return max(relaxed.lower_bound, counted.lower_bound)

    def bound_order(sizes: tuple[int, int], order: tuple[int, ...], known: float) -> float:
        left, cutoff = end - time.perf_counter(), best.objective * (1 - gap)
        if known >= cutoff or left <= 0:
            return known
        problem = candidates.problem(order, sizes)
        exact = solve_layers(problem, gap=gap / 2, time_limit_s=left, cutoff=cutoff)
        best.offer(order, sizes, problem, _placed(problem, exact))
        return max(known, exact.lower_bound)

    with ThreadPoolExecutor(os.cpu_count()) as threads:
        bounds: dict[object, float] = {}
        steps = []
        for (_, sizes, _), known in zip(pairs, threads.map(bound_all_orders, pairs), strict=True):
            if known >= best.objective * (1 - gap):
                bounds[sizes] = known
            else:
                steps += [(known, sizes, order) for order in candidates.orders]
        steps.sort(key=lambda step: step[0])
        raised = threads.map(lambda step: bound_order(step[1], step[2], step[0]), steps)
        bounds |= {step[1:]: bound for step, bound in zip(steps, raised, strict=True)}
    return bounds
