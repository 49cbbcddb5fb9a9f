"""Training steps on two unlike ranks: plans beside float32, autocast, dynamic batching and uniform precisions.

MiniLM on books of the Bible, 2,048 tokens a rank, AdamW. Rank 0 has a core of its own without bf16 units; rank 1, the
emulated slow rank, has all instructions and half of another core. Ways take turns step by step in the same processes,
a barrier before each; a step is the slower rank's. A limit is what no plan can exceed: the peer's step without
communication over the longer of the fast rank's float32 step and the slow rank's fastest, each rank by itself in every
third turn.
"""

import sys
from datetime import timedelta
from pathlib import Path
from statistics import median

import torch
from torch.nn.parallel import DistributedDataParallel

import qsync
from qsync.profiler.planning import survey
from shared.claims import Claim
from shared.comms import Group, RankPool

# What lies beside a benchmark is no module of a package.
sys.path.insert(0, str(Path(__file__).parent))

from slow_rank import LENGTH, TOKENS, Way, find_least_noise, longest, on_rank, record_uniform
from unlike_ranks import PRECISIONS, slow_down, take_turns

PEERS = [
    {
        "peer": "autocast",
        "setting": "torch's DDP, bf16 on the slow rank alone, as the fast one has no units for it and takes 3 times as long",
        "why": "the faster of autocast on both ranks and on the slow one",
    },
    {
        "peer": "dynamic batching",
        "setting": "as LB-BSP: float32, passages shared out by the ranks' measured float32 speed, losses weighed by them",
        "why": "the shares at which both ranks compute equally long; it changes what a rank's batch is",
    },
    {
        "peer": "uniform precision",
        "setting": "the slow rank in the faster of bf16 and int8, the fast one in float32",
        "why": "the fastest step without a choice of operators",
    },
]
TURNS = 15
COMMAND = "hatch run bench qsync/steps"


def run_half(turns):
    """Seconds of each way [turn][rank], the plan, HiGHS's noise, and shares of batches."""
    torch.set_num_threads(1)
    rank = Group.world().rank
    ours, peers, alone = Way(qsync.DDP), Way(DistributedDataParallel), Way(None)
    job = alone.job
    measured = survey(job.model, job.batches, job.loss_fn, precisions=PRECISIONS)
    plan = measured.allocate()
    speeds = [1 / profile.step_s for profile in measured.profiles]
    first = round(2 * TOKENS / LENGTH * speeds[0] / sum(speeds))
    shares = (first, 2 * TOKENS // LENGTH - first)
    uniform = {p: dict.fromkeys(measured.operators, p) for p in PRECISIONS}
    ways = {
        "plan": ours.bind(plan.ranks[rank].lowered),
        "float32": peers.bind({}),
        "autocast": peers.bind({}, is_cast=rank == 1),
        "dynamic batching": peers.bind({}, num_passages=shares[rank]),
        **{f"uniform {p}": ours.bind(on_rank(rank, uniform[p])) for p in ("bf16", "int8")},
    }
    by_itself = {
        "alone, fp32": alone.bind({}),
        "alone, autocast": alone.bind({}, is_cast=rank == 1),
        **{f"alone, {p}": alone.bind(on_rank(rank, uniform[p])) for p in ("bf16", "int8")},
    }
    timed = take_turns(ways | by_itself, turns, rare=by_itself)
    return timed, plan, find_least_noise(measured, plan), shares


def fastest_of_slow(timed):
    """The slow rank's fastest uniform precision by itself."""
    return min(PRECISIONS, key=lambda p: median(turn[1] for turn in timed[f"alone, {p}"]))


def bench_half(benchmark, record_claim):
    """A slow rank that has half of a core."""
    with RankPool(2, timeout=timedelta(minutes=15), prefix=slow_down((0.5,))) as pool:
        timed, plan, least, shares = benchmark.pedantic(
            lambda: pool.run(run_half, TURNS).results[0], rounds=1
        )
    steps = {name: longest(turns) for name, turns in timed.items()}
    lowest = fastest_of_slow(timed)
    fast_s = median(turn[0] for turn in timed["alone, fp32"])
    slow_s = {p: median(turn[1] for turn in timed[f"alone, {p}"]) for p in PRECISIONS}
    bound_s = max(fast_s, slow_s[lowest])
    # At the shares of dynamic batching, each rank computes the total over the sum of speeds.
    without = {
        "float32": slow_s["fp32"],
        "autocast": max(fast_s, median(turn[1] for turn in timed["alone, autocast"])),
        "dynamic batching": 2 / (1 / fast_s + 1 / slow_s["fp32"]),
    }
    lowered = list(plan.ranks[1].lowered.values())
    told = (
        f"{TURNS} turns, medians: "
        + ", ".join(f"{name} {median(turns):.3f}" for name, turns in steps.items())
        + f" s; by itself the fast rank takes {fast_s:.3f} s, the slow one "
        + ", ".join(f"{p} {s:.3f}" for p, s in slow_s.items())
        + f"; {len(lowered)} of {len(plan.operators)} operators lowered on the slow rank ({lowered.count('int8')} int8), "
        f"{len(plan.ranks[0].lowered)} on the fast one; dynamic batching {shares[0]} to {shares[1]} passages; "
        "slow rank emulated"
    )
    for name, own_s in without.items():
        ratios = [b / a for a, b in zip(steps["plan"], steps[name], strict=True)]
        limit = own_s / bound_s
        record_claim(
            Claim(
                name="step on two ranks, one on half a core, MiniLM",
                unit="s",
                ours=median(steps["plan"]),
                baseline=median(steps[name]),
                baseline_name=name,
                higher_is_better=False,
                correct=bool(lowered) and not plan.ranks[0].lowered,
                detail=told,
                source=f"{COMMAND} -k half",
            ),
            spread=(min(ratios), max(ratios)),
        )
        record_claim(
            Claim(
                name=f"share reached of the limit against {name}, half a core",
                unit="share",
                ours=median(ratios) / limit,
                baseline=0.9,
                baseline_name="the aim",
                higher_is_better=True,
                correct=limit > 0,
                detail=f"limit {limit:.3f}; {told}",
                source=f"{COMMAND} -k half",
            ),
            aim=1.0,
            spread=(min(ratios) / limit / 0.9, max(ratios) / limit / 0.9),
        )
    record_claim(
        Claim(
            name="limit of a step against float32, half a core",
            unit="times",
            ours=without["float32"] / bound_s,
            baseline=1.4,
            baseline_name="the aim",
            higher_is_better=True,
            correct=bool(lowered),
            detail=told,
            source=f"{COMMAND} -k half",
        ),
        aim=1.0,
    )
    uniform = min(("uniform bf16", "uniform int8"), key=lambda name: median(steps[name]))
    record_uniform(record_claim, steps, plan, least, told, COMMAND, "half", uniform)
