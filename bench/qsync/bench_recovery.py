"""What of a slow rank's precision a plan leaves at the same step: gradient errors beside other choices of operators.

MiniLM on books of the Bible, 2,048 tokens a rank, AdamW. Rank 0 has a core of its own without bf16 units; rank 1, the
emulated slow rank, has all instructions and 80 % of another core. Every choice is for the step that is predicted of the
slow rank's faster uniform precision; its error is that of the slow rank's gradient, measured on two batches. Steps take
turns in the same processes.
"""

import math
import sys
from datetime import timedelta
from pathlib import Path
from statistics import median

import torch

import qsync
from qsync.profiler.gradients import measure_noise
from qsync.profiler.planning import survey
from qsync.runtime.modules import list_operators
from shared.claims import Claim
from shared.comms import Group, RankPool

# What lies beside a benchmark is no module of a package.
sys.path.insert(0, str(Path(__file__).parent))

from indicators import weigh
from slow_rank import Way, find_least_noise, longest, on_rank, record_uniform
from unlike_ranks import PRECISIONS, gather, predict_s, slow_down, take_turns

PEERS = [
    {
        "peer": "uniform precision",
        "setting": "the slow rank in the faster of bf16 and int8, the fast one in float32",
        "why": "the fastest step without a choice of operators",
    },
    {
        "peer": "largest first",
        "setting": "operators lowered by the elements of their weights, to the faster uniform precision",
        "why": "what a filter by sizes does, given the same time",
    },
    {
        "peer": "paper",
        "setting": "our allocator with QSync's indicator of both passes in place of the probe's noise",
        "why": "only the indicator differs",
    },
]
TURNS = 15
LOWER = ("bf16", "int8")
COMMAND = "hatch run bench qsync/recovery"


def lower_largest(survey, target_s, fastest):
    """The slow rank's precisions by size: as few as bring the predicted step within a target."""
    weights = {op.name: op.weight_numel for op in survey.graph.ops}
    chosen = {}
    for name in sorted(survey.operators, key=lambda name: -weights.get(name, 0)):
        if predict_s(survey, [{}, chosen]) <= target_s:
            break
        chosen[name] = fastest
    return chosen


def run_recovery(turns):
    """Seconds of each way to lower the slow rank, its measured noise and predicted step, and the uniform one to beat."""
    torch.set_num_threads(1)
    rank = Group.world().rank
    ours, alone = Way(qsync.DDP), Way(None)
    job = alone.job
    measured = survey(job.model, job.batches, job.loss_fn, precisions=PRECISIONS)
    uniform = {p: dict.fromkeys(measured.operators, p) for p in LOWER}
    fastest = min(LOWER, key=lambda p: predict_s(measured, [{}, uniform[p]]))
    target_s = predict_s(measured, [{}, uniform[fastest]])
    plan = measured.allocate(target_time=target_s)
    names = list(list_operators(job.model))
    tables = torch.stack(gather(weigh(job, LOWER, "paper"))).sum(0)
    paper = {
        name: dict(zip(LOWER, row.tolist(), strict=True))
        for name, row in zip(names, tables, strict=True)
    }
    chosen = {
        "plan": plan.ranks[1].lowered,
        "paper": measured.allocate(target_time=target_s, noise=paper).ranks[1].lowered,
        "largest first": lower_largest(measured, target_s, fastest),
        **{f"uniform {p}": uniform[p] for p in LOWER},
    }
    predicted = {name: predict_s(measured, [{}, lowered]) for name, lowered in chosen.items()}
    noise = {}
    if rank == 1:
        for name, precisions in chosen.items():
            noise[name] = measure_noise(job.model, job.batches, job.loss_fn, dict(precisions))
    noise = gather(noise)[1]
    ways = {name: ours.bind(on_rank(rank, precisions)) for name, precisions in chosen.items()}
    ways["float32"] = ours.bind({})
    timed = take_turns(ways, turns)
    return timed, plan, find_least_noise(measured, plan), noise, predicted, f"uniform {fastest}"


def bench_recovery(benchmark, record_claim):
    """A slow rank that has 80 % of a core: what of its precision is left at the same step."""
    with RankPool(2, timeout=timedelta(minutes=15), prefix=slow_down((0.8,))) as pool:
        timed, plan, least, noise, predicted, fastest = benchmark.pedantic(
            lambda: pool.run(run_recovery, TURNS).results[0], rounds=1
        )
    steps = {name: longest(turns) for name, turns in timed.items()}
    kept = len(plan.operators) - len(plan.ranks[1].lowered)
    told = "; ".join(
        f"{name} {median(turns):.3f} s, predicted {predicted.get(name, math.nan):.3f}, noise {noise.get(name, 0.0):.3g}"
        for name, turns in steps.items()
    )
    told = f"{TURNS} turns: {told}; no plan can have less noise than {least:.3g}, by HiGHS; {kept} of {len(plan.operators)} operators left in float32; slow rank emulated"
    record_uniform(record_claim, steps, plan, least, told, COMMAND, "recovery", fastest)
    for name, peer in (
        (fastest, "the faster uniform precision"),
        ("largest first",) * 2,
        ("paper",) * 2,
    ):
        record_claim(
            Claim(
                name="measured gradient error of the slow rank at equal predicted steps, 80 % of a core",
                unit="squared relative error",
                ours=noise["plan"],
                baseline=noise[name],
                baseline_name=f"{peer}: {name}" if peer != name else name,
                higher_is_better=False,
                correct=predicted["plan"] <= predicted[fastest] * (1 + 1e-9),
                detail=told,
                source=f"{COMMAND} -k recovery",
            ),
            aim=1.5,
        )
