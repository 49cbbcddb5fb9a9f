"""The planner's seconds to a proven plan, its heuristic beside that plan, and brute force beside both.

Devices are those of data sheets, with the noise of layers drawn: times and sizes of one layer are
equal, as in any model. All orders of the kinds of device and all micro-batches of both phases are
searched. Every plan is checked against its limits and priced anew before its seconds count.
"""

import sys
import time
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from statistics import median

import numpy as np

from llmpq.config import ModelSpec, Quality, Workload
from llmpq.planner.problem import InfeasiblePlan
from llmpq.planner.search import plan, solve
from shared.claims import Claim

TESTS = Path(__file__).parents[2] / "packages/llmpq/tests/planner"
BITS = (3, 4, 8, 16)
SMALL = 120
COMMAND = "hatch run bench llmpq -k planning"
PEERS = [
    {
        "peer": "brute force",
        "setting": "every split and choice of widths of up to 6 layers on up to 3 devices",
        "why": "the definition of the least; it is there for its answers, not for its seconds",
    },
    {
        "peer": "the proven plan",
        "setting": "the integer program over all orders and micro-batches, to a gap of 1 %",
        "why": "the least that any plan can take, but for 1 %",
    },
]


# Operations and bytes per second, and bytes, of each kind; then seconds of a product by width.
SHEETS = {
    "A100": (200e12, 1.4e12, 38e9),
    "V100": (90e12, 0.8e12, 30e9),
    "T4": (45e12, 0.28e12, 14.5e9),
    "P100": (12e12, 0.5e12, 11e9),
}
PRODUCT = {3: 1.35, 4: 1.3, 8: 1.15, 16: 1.0}


@dataclass
class SheetCosts:
    """A roofline of data sheets: operations and bytes per second, and bytes, of each kind."""

    model: ModelSpec
    kinds: tuple[str, ...]
    bytes_per_s: float

    bits: tuple[int, ...] = BITS

    @property
    def num_devices(self):
        return len(self.kinds)

    def kind(self, device):
        return self.kinds[device]

    def prefill_s(self, device, bits, *, batch, tokens):
        flops, bandwidth, _ = SHEETS[self.kinds[device]]
        product = self.model.layer_bytes(16, None) * batch * tokens * PRODUCT[bits]
        return 1e-4 + product / (0.6 * flops) + self.model.layer_bytes(bits) / bandwidth

    def decode_s(self, device, bits, *, batch, past):
        flops, bandwidth, _ = SHEETS[self.kinds[device]]
        moved = 1.1 * self.model.layer_bytes(bits) + self.model.kv_bytes(batch, past)
        return 5e-5 + moved / bandwidth + self.model.layer_bytes(16, None) * batch / flops

    def ends_s(self, device, *, batch, tokens):
        return 1e-4 + self.model.head_bytes / SHEETS[self.kinds[device]][1]

    def send_s(self, sender, receiver, num_bytes):
        return 0.0 if sender == receiver else 5e-5 + num_bytes / self.bytes_per_s

    def memory_bytes(self, device):
        return int(SHEETS[self.kinds[device]][2])


def llama(num_layers, hidden, intermediate, heads, kv_heads):
    return ModelSpec.from_hf(
        {
            "model_type": "llama",
            "num_hidden_layers": num_layers,
            "hidden_size": hidden,
            "intermediate_size": intermediate,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "vocab_size": 32000,
            "tie_word_embeddings": False,
        }
    )


def make_case(seed, layers, kinds, *, model):
    """Arguments of `plan`: noise of a fresh draw, a limit between 3 and 8 bits, 10 GB/s links."""
    draw = np.random.default_rng(seed)
    noise = np.exp(draw.normal(0, 0.7, layers))[:, None] * np.array([0.01, 0.0025, 1e-5, 0.0])
    quality = Quality(max_kl=float(noise[:, 1].sum() * draw.uniform(1.0, 2.0)))
    workload = Workload(num_prompts=32, prompt_tokens=512, new_tokens=100)
    return model, SheetCosts(model, kinds, 10e9), noise, workload, quality


def run_plan(case, solver, time_limit_s):
    begun = time.perf_counter()
    found = plan(*case, bits=BITS, dtype="float16", solver=solver, time_limit_s=time_limit_s)
    return time.perf_counter() - begun, found


def holds(found, case):
    """Whether a plan keeps its limits and, priced anew, takes what it says."""
    problem, solution = found.problem, found.solution
    again = problem.objective(solution.bounds, solution.choice)
    return (
        problem.is_feasible(solution.bounds, solution.choice)
        and found.nats <= case[-1].max_kl * (1 + 1e-9)
        and abs(again - found.objective) <= 1e-9 * again
        and 0 < found.lower_bound <= found.objective
    )


def bench_planning_proven_and_fast(benchmark, record_claim):
    model = llama(64, 7168, 20480, 56, 56)
    kinds = ("V100", "V100", "T4", "T4", "P100", "P100")
    cases = [make_case(seed, 64, kinds, model=model) for seed in range(5)]
    run_plan(cases[0], "heuristic", 20.0)
    rows = []

    def turns():
        for case in cases:
            rows.append((case, run_plan(case, "heuristic", 20.0), run_plan(case, "milp", 60.0)))

    benchmark.pedantic(turns, rounds=1)
    fast_s = [fast[0] for _, fast, _ in rows]
    proven_s = [proven[0] for _, _, proven in rows]
    over = [fast[1].objective / proven[1].objective for _, fast, proven in rows]
    whole = all(holds(found[1], case) for case, *pair in rows for found in pair)
    record_claim(
        Claim(
            name="a plan proven to 1 %: 64 layers, 6 devices of 3 kinds, 4 widths",
            unit="s",
            ours=median(proven_s),
            baseline=20.0,
            baseline_name="the aim",
            higher_is_better=False,
            correct=whole and all(proven[1].gap <= 0.01 + 1e-6 for _, _, proven in rows),
            detail=f"{len(rows)} draws of noise and quality, {min(proven_s):.1f}-"
            f"{max(proven_s):.1f} s; all orders and micro-batches",
            source=COMMAND,
        ),
        aim=1.0,
        spread=(20.0 / max(proven_s), 20.0 / min(proven_s)),
    )
    record_claim(
        Claim(
            name="the heuristic's plan, 64 layers, 6 devices of 3 kinds, 4 widths",
            unit="s",
            ours=median(fast_s),
            baseline=1.0,
            baseline_name="the aim",
            higher_is_better=False,
            correct=whole and max(over) <= 1.02,
            detail=f"{min(fast_s):.2f}-{max(fast_s):.2f} s; its plans take "
            f"{min(over):.4f}-{max(over):.4f} of the proven ones, at most 1.02",
            source=COMMAND,
        ),
        aim=1.0,
        spread=(1.0 / max(fast_s), 1.0 / min(fast_s)),
    )


def bench_planning_large(benchmark, record_claim):
    kinds = tuple(kind for kind in ("A100", "V100", "T4", "P100") for _ in range(8))
    model = llama(126, 16384, 53248, 128, 8)
    cases = [make_case(seed, 126, kinds, model=model) for seed in range(3)]
    rows = []

    def turns():
        for case in cases:
            rows.append((case, run_plan(case, "auto", 60.0)))

    benchmark.pedantic(turns, rounds=1)
    seconds = [found[0] for _, found in rows]
    gaps = ", ".join(f"{100 * found[1].gap:.1f} %" for _, found in rows)
    record_claim(
        Claim(
            name="a plan for 126 layers on 32 devices of 4 kinds, 4 widths",
            unit="s",
            ours=median(seconds),
            baseline=60.0,
            baseline_name="the aim",
            higher_is_better=False,
            correct=all(holds(found[1], case) for case, found in rows),
            detail=f"{min(seconds):.1f}-{max(seconds):.1f} s; gaps {gaps}",
            source=COMMAND,
        ),
        aim=1.0,
        spread=(60.0 / max(seconds), 60.0 / min(seconds)),
    )


def bench_planning_brute_force(benchmark, record_claim):
    sys.path.insert(0, str(TESTS))
    try:
        problems = import_module("problems")
    finally:
        sys.path.remove(str(TESTS))
    exact = []

    def turns():
        for seed in range(1000, 1000 + SMALL):
            problem = problems.random_problem(seed, max_layers=6)
            best = problems.best_by_brute_force(problem)
            try:
                found = solve(problem, "milp").objective
            except InfeasiblePlan:
                found = np.inf
            exact.append(found == best or abs(found - best) <= 1e-7 * best)

    benchmark.pedantic(turns, rounds=1)
    record_claim(
        Claim(
            name="up to 6 layers on 3 devices: problems solved as by brute force",
            unit="problems",
            ours=sum(exact),
            baseline=SMALL,
            baseline_name="brute force",
            higher_is_better=True,
            correct=sum(exact) == SMALL,
            detail="equal and unequal layers, both formulas, with and without messages and ends",
            source=COMMAND,
        ),
        aim=1.0,
        spread=(sum(exact) / SMALL, sum(exact) / SMALL),
    )
