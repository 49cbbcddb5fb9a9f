"""A plan that lowers nothing beside torch's DDP: weights to the bit, collectives and seconds of a step.

MiniLM on books of the Bible, 2,048 tokens a rank, AdamW, two equal ranks that take turns step by step.
"""

import math
import sys
from datetime import timedelta
from pathlib import Path
from statistics import median

import torch
from torch.nn.parallel import DistributedDataParallel

import qsync
from shared.claims import Claim
from shared.comms import RankPool

# What lies beside a benchmark is no module of a package.
sys.path.insert(0, str(Path(__file__).parent))

from slow_rank import TOKENS, Way, longest
from unlike_ranks import gather, take_turns

PEERS = [
    {
        "peer": "torch's DDP",
        "setting": "DistributedDataParallel with its default buckets, fused AdamW; the same in both",
        "why": "what qsync.DDP wraps",
    }
]
TURNS = 20
COMMAND = "hatch run bench qsync/float32"


def count_collectives(step):
    """Collectives of one step, as the profiler sees them."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        step(0)
    return sum(event.name.startswith("gloo:") for event in profile.events() or ())


def run_float32(turns):
    """Seconds of both ways, their collectives, and whether all weights and losses are equal."""
    torch.set_num_threads(1)
    theirs, ours = Way(DistributedDataParallel), Way(None)
    qsync.apply(ours.job.model, qsync.Plan.uniform(ours.job.model, "fp32"))
    ours.model = qsync.DDP(ours.job.model)
    ways = {"plan": ours.bind({}), "DDP": theirs.bind({})}
    begin = [each.detach().clone() for each in ours.job.model.parameters()]
    timed = take_turns(ways, turns)
    pairs = list(zip(ours.job.model.parameters(), theirs.job.model.parameters(), strict=True))
    is_equal = all(torch.equal(a, b) for a, b in pairs)
    is_moved = not all(torch.equal(a, b) for a, (b, _) in zip(begin, pairs, strict=True))
    counts = {name: count_collectives(step) for name, step in ways.items()}
    return timed, counts, all(gather(is_equal)) and is_moved


def bench_float32(benchmark, record_claim):
    """A plan that lowers nothing beside torch's DDP, on equal ranks."""
    with RankPool(2, timeout=timedelta(minutes=15)) as pool:
        timed, counts, is_equal = benchmark.pedantic(
            lambda: pool.run(run_float32, TURNS).results[0], rounds=1
        )
    steps = {name: longest(each) for name, each in timed.items()}
    ratios = [b / a for a, b in zip(steps["plan"], steps["DDP"], strict=True)]
    detail = f"{TURNS + 1} steps of {TOKENS} tokens a rank, weights equal to the bit: {is_equal}; collectives a step {counts}"
    for title, unit, ours, baseline, ratio, aim in (
        ("step", "s", median(steps["plan"]), median(steps["DDP"]), median(ratios), 1 / 1.03),
        ("collectives of a step", "all-reduces", counts["plan"], counts["DDP"], math.nan, 1.0),
    ):
        record_claim(
            Claim(
                name=f"{title} of an all-float32 plan, MiniLM, 2 ranks",
                unit=unit,
                ours=ours,
                baseline=baseline,
                baseline_name="torch's DDP",
                higher_is_better=False,
                correct=is_equal and counts["DDP"] > 0,
                ratio=ratio,
                detail=detail,
                source=f"{COMMAND} -k float32",
            ),
            aim=aim,
            spread=(min(ratios), max(ratios)) if title == "step" else None,
        )
