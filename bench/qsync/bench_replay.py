"""Predicted steps of plans that never ran beside the measured ones, on two and three unlike ranks.

Each rank draws a precision for every operator of every plan. All plans are predicted from one profile of uniform
precisions and a few float32 steps of all ranks, before any of them runs; then they take turns under torch's DDP,
without optimizer. An emulated slow rank: the first rank has a core of its own without bf16 units, the others have
shares of the second core. Also told: how far the halves of the measured turns are apart, below which no prediction can
be told from another.
"""

import sys
from datetime import timedelta
from pathlib import Path
from statistics import mean, median

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from qsync.profiler.planning import survey
from shared.claims import Claim
from shared.comms import Group, RankPool

# What lies beside a benchmark is no module of a package.
sys.path.insert(0, str(Path(__file__).parent))

from real_models import build_job, draw_precisions
from unlike_ranks import PRECISIONS, lower, predict_s, slow_down, take_turns

PEERS = [
    {
        "peer": "the mean of all plans",
        "setting": "every plan predicted by the mean of all measured steps",
        "why": "what a prediction that knows the machine and not the plan gets at the most",
    }
]
NUM_PLANS, TURNS, TOKENS = 20, 6, 512
SHARES = {2: (0.6,), 3: (0.45, 0.45)}
COMMAND = "hatch run bench qsync/replay"


def run_plans(name, num_plans, turns, tokens):
    """Predicted seconds of each plan, and its measured ones [turn]; last of float32, which was measured before."""
    torch.set_num_threads(1)
    world = Group.world()
    job = build_job(name, num_batches=2, tokens=tokens)
    measured = survey(job.model, job.batches, job.loss_fn, precisions=PRECISIONS)
    generator = torch.Generator().manual_seed(0)
    plans = [
        [
            draw_precisions(list(measured.operators), PRECISIONS, generator)
            for _ in range(world.world_size)
        ]
        for _ in range(num_plans)
    ]
    plans.append([{} for _ in range(world.world_size)])
    predicted = [predict_s(measured, plan) for plan in plans]
    model = DistributedDataParallel(job.model)

    def bind(plan):
        def step(turn):
            lower(job.model, plan[world.rank])
            model.zero_grad(set_to_none=True)
            job.loss_fn(model, job.batches[turn % 2]).backward()

        return step

    timed = take_turns({str(i): bind(plan) for i, plan in enumerate(plans)}, turns)
    return predicted, [[max(turn) for turn in timed[str(i)]] for i in range(len(plans))]


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("name", ["MiniLM", "Llama"])
def bench_replay(benchmark, record_claim, name, num_ranks):
    with RankPool(
        num_ranks, timeout=timedelta(minutes=10), prefix=slow_down(SHARES[num_ranks])
    ) as pool:
        predicted, measured = benchmark.pedantic(
            lambda: pool.run(run_plans, name, NUM_PLANS, TURNS, TOKENS).results[0], rounds=1
        )
    *predicted, float32_s = predicted
    *measured, float32 = measured
    steps = [median(turns) for turns in measured]
    errors = [abs(p / m - 1) for p, m in zip(predicted, steps, strict=True)]
    halves = [abs(median(turns[::2]) / median(turns[1::2]) - 1) for turns in measured]
    average = mean(steps)
    blind = mean(abs(average / m - 1) for m in steps)
    detail = (
        f"{NUM_PLANS} plans, {TURNS} turns of {TOKENS} tokens a rank; steps {min(steps):.3f} to {max(steps):.3f} s; "
        f"predicted over measured {min(p / m for p, m in zip(predicted, steps, strict=True)):.3f} to "
        f"{max(p / m for p, m in zip(predicted, steps, strict=True)):.3f}; halves of the turns "
        f"{mean(halves):.1%} apart in the mean, {max(halves):.1%} at most; float32, which the prediction is fitted to, "
        f"{float32_s / median(float32):.3f}; slow ranks emulated"
    )
    where = f"{name}, {num_ranks} ranks"
    for title, ours, baseline, baseline_name, aim in (
        (
            "mean error",
            mean(errors),
            max(0.05, mean(halves)),
            "the aim: 5 %, or the halves' distance",
            1.0,
        ),
        ("mean error", mean(errors), blind, "the mean of all plans", None),
        ("largest error", max(errors), 0.12, "the aim", 1.0),
    ):
        record_claim(
            Claim(
                name=f"{title} of a predicted step, {where}",
                unit="%",
                ours=100 * ours,
                baseline=100 * baseline,
                baseline_name=baseline_name,
                higher_is_better=False,
                correct=max(steps) > 1.1 * min(steps),
                detail=detail,
                source=f'{COMMAND} -k "{name} and {num_ranks}"',
            ),
            aim=aim,
        )
