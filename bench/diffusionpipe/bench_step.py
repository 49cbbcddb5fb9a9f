"""A training step of a small Stable Diffusion on two hosts at 100 Mbit/s: our plans beside DDP, FSDP2 and torch's pipelines.

Two ranks, a core each, on emulated hosts; ways take turns step by step, a barrier before each, and a step
is the slower rank's. Every way trains its own copy of the same U-Net with AdamW on the same digits and
draws, so that their losses can be compared; those of ours must be DDP's. The batch is chosen so that DDP,
its frozen part encoded a step ahead by a thread, exposes 35 to 45 % of its step. What no way can exceed is
DDP's step over the larger of its step without communication and the bytes that ours sends over the rate.
"""

import sys
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch

import diffusionpipe as dp
from shared.claims import Claim
from shared.comms import NetLab, netlab
from shared.comms.handicap import handicap

# What lies beside a benchmark is no module of a package.
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
from torch_ways import DataParallel, Pipeline, shard, wrap_ddp
from turns import compare, list_ratios, take_turns

pytestmark = [
    pytest.mark.netns,
    pytest.mark.skipif(netlab.available() is not None, reason=str(netlab.available())),
]

PEERS = [
    {
        "peer": "DDP",
        "setting": "torch 2.13, gloo, the best of buckets of 1, 5 and 25 MB, gradients as views of buckets; "
        "the frozen part first, or the next batch's in a thread from the start of the backward pass",
        "why": "the thread fills the wait for gradients; buckets are chosen by steps before the turns",
    },
    {
        "peer": "DDP in bf16",
        "setting": "the same, gradients travel in bf16 by a hook of four lines, as torch refuses its own over "
        "gloo",
        "why": "halves the bytes, at the cost of precision",
    },
    {
        "peer": "FSDP2",
        "setting": "a group a block, weights kept whole until the backward pass, frozen part first or ahead as for "
        "DDP",
        "why": "the fewest bytes that FSDP2 can send",
    },
    {
        "peer": "torch's Schedule1F1B and ScheduleInterleavedZeroBubble",
        "setting": "our chain's two stages, skips carried, the better of 4 and 8 micro-batches, frozen part "
        "split evenly and first",
        "why": "the stages that our partition finds the best",
    },
]
RATE, TURNS = "100mbit", 15
BUCKETS_MB, SHARE, SHARES = (1, 5, 25), 0.4, (0.35, 0.45)
"""Share of its step that DDP is to expose, and between which it must lie."""
FIRST_BATCHES, STEP, LARGEST = (96, 224), 16, 320
"""Batches between which the right one is looked for, the grid of batches, and the largest."""
AIM, BEST_AIM = 0.9, 1.1
COMMAND = "hatch run bench diffusionpipe/step"


def time_ways(ways, num_turns=2):
    """Median seconds of each way in a few turns, the same on every rank."""
    turns = take_turns(ways, num_turns, num_warm=1)
    return {name: median(turns.seconds(name)) for name in ways}


def choose_batch(job):
    """The batch with which DDP exposes the wanted share of its step.

    Found on a line through two batches, then by one measurement there.
    """
    points = [(size, *measure_exposed(job, size)) for size in FIRST_BATCHES]
    size = interpolate(points)
    alone_s, exposed_s = measure_exposed(job, size)
    # Exposed seconds hardly depend on the batch, computed ones grow with it.
    size *= exposed_s / alone_s * (1 - SHARE) / SHARE
    return min(max(STEP, STEP * round(size / STEP)), LARGEST)


def measure_exposed(job, size):
    """Seconds of DDP's step without communication, and those that this adds."""
    wrap = wrap_ddp(BUCKETS_MB[0])
    seconds = time_ways(
        {
            "ddp": DataParallel(job, size, wrap, is_prefetched=True),
            "alone": DataParallel(job, size, wrap, is_alone=True),
        }
    )
    return seconds["alone"], max(seconds["ddp"] - seconds["alone"], 0.0)


def interpolate(points):
    """The batch of the wanted share, on a line through two batches."""
    (low, *low_s), (high, *high_s) = points

    def find_share(size):
        position = (size - low) / (high - low)
        alone_s, exposed_s = (a + position * (b - a) for a, b in zip(low_s, high_s, strict=True))
        return max(exposed_s, 0.0) / (alone_s + max(exposed_s, 0.0))

    # Seconds were gathered, so that all ranks choose the same.
    return min(range(STEP, LARGEST + 1, STEP), key=lambda size: abs(find_share(size) - SHARE))


def choose_bucket(job, size, *, is_bf16):
    """The fastest size of DDP's buckets."""
    ways = {
        mb: DataParallel(job, size, wrap_ddp(mb, is_bf16=is_bf16), is_prefetched=True)
        for mb in BUCKETS_MB
    }
    seconds = time_ways(ways)
    return min(seconds, key=seconds.__getitem__)


def choose_micro_batches(job, spans, size, schedule):
    """The better number of micro-batches of one of torch's schedules."""
    ways = {count: Pipeline(job, spans, size, count, schedule) for count in (4, 8)}
    seconds = time_ways(ways, 1)
    return min(seconds, key=seconds.__getitem__)


def prepare():
    """The job, its batch, profile, cluster and our choice."""
    torch.set_num_threads(1)
    job = build_job()
    size = choose_batch(job)
    profile, cluster = measure_profile(job, size), fit_cluster(has_hosts=True)
    return job, size, profile, cluster, dp.plan(job, profile, cluster, batch_size=size)


def describe(plan):
    return f"{plan.placement} of {plan.num_stages}, {plan.num_micro_batches} micro-batches"


def run_against_ddp(num_turns):
    job, size, _, _, plan = prepare()
    buckets = {is_bf16: choose_bucket(job, size, is_bf16=is_bf16) for is_bf16 in (False, True)}
    ways: dict[str, Any] = {"ours": Engine(job, plan)}
    for is_bf16, mb in buckets.items():
        for is_prefetched in (True, False):
            name = f"DDP{' in bf16' if is_bf16 else ''}, frozen part {'ahead' if is_prefetched else 'first'}"
            wrap = wrap_ddp(mb, is_bf16=is_bf16)
            ways[name] = DataParallel(job, size, wrap, is_prefetched=is_prefetched)
    ways["alone"] = DataParallel(job, size, wrap_ddp(buckets[False]), is_alone=True)
    turns = take_turns(ways, num_turns, rare=("alone",))
    untrained = measure_untrained(job, size, num_turns)
    sent_bytes = [rank.sent_bytes for rank in plan.ranks]
    return turns, untrained, plan, buckets, max(sent_bytes)


def run_against_others(num_turns):
    job, size, profile, cluster, plan = prepare()
    spans = dp.plan(job, profile, cluster, batch_size=size, num_stages=2, placement="chain").spans
    ways: dict[str, Any] = {
        "ours": Engine(job, plan),
        "ours, unfilled": Engine(job, put_first(plan, profile, cluster)),
        "FSDP2, frozen part first": DataParallel(job, size, shard),
        "FSDP2, frozen part ahead": DataParallel(job, size, shard, is_prefetched=True),
    }
    for schedule in ("Schedule1F1B", "ScheduleInterleavedZeroBubble"):
        count = choose_micro_batches(job, spans, size, schedule)
        ways[f"{schedule} of {count}"] = Pipeline(job, spans, size, count, schedule)
    ways["DDP"] = DataParallel(job, size, wrap_ddp(BUCKETS_MB[0]), is_prefetched=True)
    turns = take_turns(ways, num_turns)
    return turns, measure_untrained(job, size, num_turns), plan


def run_placements(num_turns):
    job, size, profile, cluster, choice = prepare()
    plans = {
        placement: dp.plan(
            job, profile, cluster, batch_size=size, placement=placement,
            num_stages=1 if placement == "data" else 2,
        )
        for placement in ("data", "chain", "folded")
    }  # fmt: skip
    ways: dict[str, Any] = {placement: Engine(job, plan) for placement, plan in plans.items()}
    ways["DDP"] = DataParallel(job, size, wrap_ddp(BUCKETS_MB[0]), is_prefetched=True)
    turns = take_turns(ways, num_turns)
    return turns, measure_untrained(job, size, num_turns), plans, choice


@pytest.fixture
def lab_pool():
    words = [handicap(cores=[0]), handicap(cores=[1])]
    with (
        NetLab(hosts=2, rate=RATE) as lab,
        lab.pool(handicaps=words, timeout=timedelta(minutes=15)) as pool,
    ):
        yield lab, pool


def bench_ddp(lab_pool, benchmark, record_claim):
    """Our choice beside DDP, with and without bf16 gradients."""
    lab, pool = lab_pool
    turns, untrained, plan, buckets, sent_bytes = benchmark.pedantic(
        lambda: pool.run(run_against_ddp, TURNS).results[0], rounds=1
    )
    ours, alone_s = turns.seconds("ours"), median(turns.seconds("alone"))
    limit_s = max(alone_s, sent_bytes / lab.bytes_per_s)
    ahead = median(turns.seconds("DDP, frozen part ahead"))
    exposed = 1 - alone_s / ahead
    reference = turns.losses["DDP, frozen part first"]
    is_right = is_same_training(turns.losses["ours"], reference, untrained)
    is_in_range = SHARES[0] <= exposed <= SHARES[1]
    told = (
        f"batch {plan.batch_size}, DDP exposes {exposed:.0%}; ours: {describe(plan)}, predicted "
        f"{plan.predicted_s:.3f} s; buckets of {buckets[False]} and in bf16 {buckets[True]} MB; seconds "
        f"of {TURNS} turns, medians and ranges: {turns.describe()}; no way below {limit_s:.3f} s"
    )
    names = [name for name in turns.steps if name.startswith("DDP")]
    best = {
        is_bf16: min(
            (name for name in names if ("bf16" in name) == is_bf16),
            key=lambda name: median(turns.seconds(name)),
        )
        for is_bf16 in (False, True)
    }
    for is_bf16, name in best.items():
        claim, spread = compare(
            "training step on two hosts, 100 Mbit/s", ours, turns.seconds(name),
            f"DDP{' in bf16' if is_bf16 else ''} at its best: {name}",
            correct=is_right and is_in_range, detail=told, source=f"{COMMAND} -k ddp",
        )  # fmt: skip
        record_claim(
            claim,
            aim=BEST_AIM if is_bf16 else AIM * median(turns.seconds(name)) / limit_s,
            spread=spread,
        )
    shares = [limit_s / own for own in ours]
    record_claim(
        Claim(
            name="share reached of the limit of a step, 100 Mbit/s", unit="share",
            ours=median(shares), baseline=AIM, baseline_name="the aim", higher_is_better=True,
            correct=is_right and is_in_range, detail=told, source=f"{COMMAND} -k ddp",
        ),
        aim=1.0, spread=(min(shares) / AIM, max(shares) / AIM),
    )  # fmt: skip


def bench_others(lab_pool, benchmark, record_claim):
    """Our choice beside FSDP2, torch's pipelines and itself unfilled."""
    _, pool = lab_pool
    turns, untrained, plan = benchmark.pedantic(
        lambda: pool.run(run_against_others, TURNS).results[0], rounds=1
    )
    is_right = is_same_training(turns.losses["ours"], turns.losses["DDP"], untrained)
    told = f"batch {plan.batch_size}; ours: {describe(plan)}; {TURNS} turns: {turns.describe()}"
    for name in turns.steps:
        if name in ("ours", "DDP"):
            continue
        is_peer_right = is_same_training(turns.losses[name], turns.losses["DDP"], untrained)
        claim, spread = compare(
            "training step on two hosts, 100 Mbit/s", turns.seconds("ours"), turns.seconds(name),
            name.replace(" of ", ": micro-batches "), correct=is_right and is_peer_right,
            detail=told, source=f"{COMMAND} -k others",
        )  # fmt: skip
        record_claim(claim, aim=BEST_AIM if "ours" not in name else None, spread=spread)


def bench_placements(lab_pool, benchmark, record_claim):
    """The best plan of each placement beside DDP."""
    _, pool = lab_pool
    turns, untrained, plans, choice = benchmark.pedantic(
        lambda: pool.run(run_placements, TURNS).results[0], rounds=1
    )
    fastest = min(plans, key=lambda name: median(turns.seconds(name)))
    for name, plan in plans.items():
        ratios = list_ratios(turns.seconds(name), turns.seconds("DDP"))
        error = plan.predicted_s / median(turns.seconds(name)) - 1
        claim, _ = compare(
            f"training step on two hosts, 100 Mbit/s, {name}", turns.seconds(name),
            turns.seconds("DDP"), "DDP, frozen part ahead",
            correct=is_same_training(turns.losses[name], turns.losses["DDP"], untrained),
            detail=f"{describe(plan)}, predicted {plan.predicted_s:.3f} s ({error:+.1%}); chosen: "
            f"{choice.placement}, fastest: {fastest}; {TURNS} turns: {turns.describe()}",
            source=f"{COMMAND} -k placements",
        )  # fmt: skip
        record_claim(claim, spread=(min(ratios), max(ratios)))
