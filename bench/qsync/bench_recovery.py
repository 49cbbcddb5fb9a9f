"""What of a slow rank's precision a plan leaves at the same step: gradient errors beside other choices of operators.

MiniLM on books of the Bible, 2,048 tokens a rank, AdamW. Rank 0 has a core of its own without bf16 units; rank 1, the
emulated slow rank, has all instructions and 80 % of another core. Every choice is for the step that the plan predicts;
its error is that of the slow rank's gradient, measured on two batches. Steps take turns in the same processes.
"""

import math
import sys
from datetime import timedelta
from pathlib import Path
from statistics import median

import torch

import qsync
from qsync.planner.replayer import StepReplay
from qsync.profiler.gradients import measure_noise
from qsync.runtime.modules import list_operators
from shared.claims import Claim
from shared.comms import Group, RankPool

# What lies beside a benchmark is no module of a package.
sys.path.insert(0, str(Path(__file__).parent))

from indicators import weigh
from slow_rank import Way, find_least_noise, longest, on_rank, record_uniform
from unlike_ranks import PRECISIONS, gather, slow_down, survey_ranks, take_turns

PEERS = [
    {
        "peer": "uniform precision",
        "setting": "the slow rank in the faster of bf16 and int8, the fast one in float32",
        "why": "the fastest step without a choice of operators",
    },
    {
        "peer": "largest first",
        "setting": "operators lowered by the elements of their weights, to the slow rank's fastest precision, until the "
        "predicted step is within the plan's",
        "why": "what a filter by sizes does, given the same time",
    },
    {
        "peer": "paper",
        "setting": "our allocator with QSync's indicator of both passes in place of the probe's noise, for the same step",
        "why": "only the indicator differs",
    },
]
TURNS = 15
COMMAND = "hatch run bench qsync/recovery"


def lower_largest(survey, plan, fastest):
    """The slow rank's precisions by size: as few as bring the predicted step within the plan's."""
    weights = {op.name: op.weight_numel for op in survey.graph.ops}
    replay, chosen = StepReplay(survey.graph, survey.buckets, 2), {}
    for name in sorted(survey.operators, key=lambda name: -weights.get(name, 0)):
        if survey.predict_s(replay, [{}, chosen]) <= plan.step_s:
            break
        chosen[name] = fastest
    return chosen, survey.predict_s(replay, [{}, chosen])


def run_recovery(turns):
    """Seconds, measured noise and predicted step of each way to lower the slow rank."""
    torch.set_num_threads(1)
    rank = Group.world().rank
    ours, alone = Way(qsync.DDP), Way(None)
    survey = survey_ranks(alone.job, has_noise=True)
    plan = survey.plan(survey.noise)
    names = list(list_operators(alone.job.model))
    table = weigh(alone.job, PRECISIONS[:2], "paper")
    tables = torch.stack(gather(table)).sum(0)
    paper = {
        name: {**dict(zip(PRECISIONS[:2], row.tolist(), strict=True)), "fp32": 0.0}
        for name, row in zip(names, tables, strict=True)
    }
    by_paper = survey.plan(paper, target_time=plan.step_s)
    uniform = {p: dict.fromkeys(survey.operators, p) for p in PRECISIONS[:2]}
    replay = StepReplay(survey.graph, survey.buckets, 2)
    predicted = {f"uniform {p}": survey.predict_s(replay, [{}, uniform[p]]) for p in uniform}
    fastest = min(predicted, key=predicted.__getitem__)
    by_size, predicted["largest first"] = lower_largest(survey, plan, fastest.split()[1])
    chosen = {
        "plan": plan.ranks[1].lowered,
        "paper": by_paper.ranks[1].lowered,
        "largest first": by_size,
        **{f"uniform {p}": uniform[p] for p in uniform},
    }
    predicted |= {"plan": plan.step_s, "paper": by_paper.step_s}
    noise = {}
    if rank == 1:
        for name, precisions in chosen.items():
            noise[name] = measure_noise(
                alone.job.model, alone.job.batches, alone.job.loss_fn, dict(precisions)
            )
    noise = gather(noise)[1]
    ways = {name: ours.bind(on_rank(rank, precisions)) for name, precisions in chosen.items()}
    ways["float32"] = ours.bind({})
    timed = take_turns(ways, turns)
    return timed, plan, find_least_noise(survey, plan), noise, predicted


def bench_recovery(benchmark, record_claim):
    """A slow rank that has 80 % of a core: what of its precision is left at the same step."""
    with RankPool(2, timeout=timedelta(minutes=15), prefix=slow_down((0.8,))) as pool:
        timed, plan, least, noise, predicted = benchmark.pedantic(
            lambda: pool.run(run_recovery, TURNS).results[0], rounds=1
        )
    steps = {name: longest(turns) for name, turns in timed.items()}
    fastest = min(("uniform bf16", "uniform int8"), key=lambda name: median(steps[name]))
    kept = len(plan.operators) - len(plan.ranks[1].lowered)
    told = "; ".join(
        f"{name} {median(turns):.3f} s, predicted {predicted.get(name, math.nan):.3f}, noise {noise.get(name, 0.0):.3g}"
        for name, turns in steps.items()
    )
    told = f"{TURNS} turns: {told}; {kept} of {len(plan.operators)} operators left in float32; slow rank emulated"
    record_uniform(record_claim, steps, plan, least, told, COMMAND, "recovery")
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
                correct=predicted["plan"] <= 1.03 * max(predicted[name], plan.step_s),
                detail=told,
                source=f"{COMMAND} -k recovery",
            ),
            aim=1.5,
        )
