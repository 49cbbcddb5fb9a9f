"""Data parallelism on two hosts at 100 Mbit/s: the next batch's frozen part runs while gradients travel.

The same data-parallel plan steps filled and unfilled in turns. What filling can hide is the smaller of the
frozen part and the wait for gradients, both read off the unfilled steps; what it hides is the difference of
the steps.
"""

import sys
from datetime import timedelta
from pathlib import Path
from statistics import median

import pytest
import torch

import diffusionpipe as dp
from shared.claims import Claim
from shared.comms import NetLab, netlab
from shared.comms.handicap import handicap

sys.path.insert(0, str(Path(__file__).parent))

from small_sd import (
    Engine,
    build_job,
    fit_cluster,
    is_same_training,
    measure_profile,
    measure_untrained,
    put_first,
)
from turns import take_turns

pytestmark = [
    pytest.mark.netns,
    pytest.mark.skipif(netlab.available() is not None, reason=str(netlab.available())),
]

PEERS = [
    {
        "peer": "ours, unfilled",
        "setting": "the same plan, each rank encodes its share before its forward pass",
        "why": "differs in nothing but where the frozen part runs",
    },
]
RATE, BATCHES, TURNS, AIM = "100mbit", {"small": 32, "large": 96}, 15, 0.9
"""Batches: with the small one the wait exceeds the frozen part, with the large one it does not."""
COMMAND = "hatch run bench diffusionpipe/overlap"


def run(batch_size, num_turns):
    torch.set_num_threads(1)
    job = build_job()
    profile, cluster = measure_profile(job, batch_size), fit_cluster(has_hosts=True)
    plan = dp.plan(
        job, profile, cluster, batch_size=batch_size, num_stages=1, num_micro_batches=1,
        placement="data",
    )  # fmt: skip
    ways = {"filled": Engine(job, plan), "unfilled": Engine(job, put_first(plan, profile, cluster))}
    turns = take_turns(ways, num_turns)
    report = ways["unfilled"].engine.report()
    untrained = measure_untrained(job, batch_size, num_turns)
    # By turn, of the rank for which there was less to hide.
    steps = [own[-num_turns:] for own in report.steps]
    frozen = [min(one.filled_s for one in ranks) for ranks in zip(*steps, strict=True)]
    waited = [min(one.waited_s for one in ranks) for ranks in zip(*steps, strict=True)]
    return turns, frozen, waited, untrained, plan


@pytest.mark.parametrize("name", list(BATCHES))
def bench_overlap(benchmark, record_claim, name):
    words = [handicap(cores=[0]), handicap(cores=[1])]
    with (
        NetLab(hosts=2, rate=RATE) as lab,
        lab.pool(handicaps=words, timeout=timedelta(minutes=10)) as pool,
    ):
        turns, frozen, waited, untrained, plan = benchmark.pedantic(
            lambda: pool.run(run, BATCHES[name], TURNS).results[0], rounds=1
        )
    filled, unfilled = turns.seconds("filled"), turns.seconds("unfilled")
    able_s = [min(pair) for pair in zip(frozen, waited, strict=True)]
    shares = [(b - a) / able for a, b, able in zip(filled, unfilled, able_s, strict=True)]
    claim = Claim(
        name=f"share hidden of what gradients' way can hide of the frozen part, {name} batch",
        unit="share", ours=median(shares), baseline=AIM, baseline_name="the aim",
        higher_is_better=True,
        correct=is_same_training(turns.losses["filled"], turns.losses["unfilled"], untrained)
        and min(able_s) > 0.05
        # More than all of it cannot be hidden.
        and median(shares) <= 1.15,
        detail=f"batch {BATCHES[name]}: frozen part {median(frozen):.3f} s, wait for gradients "
        f"{median(waited):.3f} s a step; predicted {plan.predicted_s:.3f} s; {TURNS} turns: {turns.describe()}",
        source=f"{COMMAND} -k {name}",
    )  # fmt: skip
    quartiles = sorted(shares)
    low, high = quartiles[len(shares) // 4], quartiles[-1 - len(shares) // 4]
    record_claim(claim, aim=1.0, spread=(max(low, 0.0) / AIM, max(high, 0.0) / AIM))
