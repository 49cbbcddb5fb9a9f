"""Bytes of a training step between two hosts: counted beside planned, folded beside chain.

A U-Net of three levels, whose skips weigh as SD's do, trains for some steps by two plans, over a link so slow that
the planner saves bytes; over a faster one it balances the ranks instead, as bytes travel unnoticed. The engine's ledger counts
what each rank sends in messages, and the hosts' devices count all frames. A folded plan holds both ends of
a skip on one rank, so that only hidden states and embeddings travel.
"""

import sys
from datetime import timedelta
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

import diffusionpipe as dp
from diffusionpipe.data import build_pipeline, iterate_batches, load_digits
from shared.claims import Claim
from shared.comms import NetLab, netlab
from shared.topology import Cluster, Link
from shared.topology.device import CPU

sys.path.insert(0, str(Path(__file__).parent))

from small_sd import SEED, fit_cluster, make_optimizer

pytestmark = [
    pytest.mark.netns,
    pytest.mark.skipif(netlab.available() is not None, reason=str(netlab.available())),
]

BATCH, STEPS, COUNT, RATE = 8, 3, 4, "10mbit"
OTHER_RATES = (1, 10, 100, 1000)
"""Mbit/s for which plans are made beside, and not run."""
CHANNELS, IMAGE_SIZE = (64, 128, 256), 64
"""Levels that halve as SD's do, so that the outer device's layers take about half of the time."""
SHARE = 0.25
"""Of a folded plan's bytes in a chain's."""
COMMAND = "hatch run bench diffusionpipe/bytes"


def iterate():
    """Batches without end, the same on both ranks."""
    return iterate_batches(load_digits(IMAGE_SIZE), BATCH, seed=SEED)


@cache
def make_plans():
    """The job and both plans, with the messages by which links are measured."""
    torch.set_num_threads(1)
    pipeline = build_pipeline(channels=CHANNELS, image_size=IMAGE_SIZE, seed=SEED)
    job = dp.Job.from_pipeline(pipeline)
    profile = dp.profile(job, next(iterate()), sizes=(1, BATCH // COUNT), repeats=2)
    clusters = {"": fit_cluster(has_hosts=True)} | {
        f"{rate} Mbit/s": Cluster.uniform(2, 1, CPU, network=Link.from_rate(rate * 125_000))
        for rate in OTHER_RATES
    }
    plans = {
        name: {
            placement: dp.plan(
                job, profile, cluster, batch_size=BATCH, placement=placement, num_stages=2,
                num_micro_batches=COUNT,
            )
            for placement in ("chain", "folded")
        }
        for name, cluster in clusters.items()
    }  # fmt: skip
    return (
        job,
        plans.pop(""),
        {
            name: sum(own["folded"].edges.values()) / sum(own["chain"].edges.values())
            for name, own in plans.items()
        },
    )


def prepare():
    """Makes the plans before frames are counted."""
    make_plans()


def count(placement):
    """Bytes by edge as planned and as counted, and the losses."""
    job, plans, others = make_plans()
    engine = dp.Engine(job, plans[placement], make_optimizer, seed=SEED)
    # Behind the last batch nothing is encoded, so that steps and encoded batches are as many.
    losses = list(engine.steps(islice(iterate(), STEPS)))
    report = engine.report()
    return dict(plans[placement].edges), dict(report.edges), losses, others


def find_cut_bytes(name):
    """SD 2.1's largest cut on meta tensors: bytes of a sample that pass it, by placement."""
    from diffusers import UNet2DConditionModel

    build: Any = UNet2DConditionModel
    with torch.device("meta"):
        model = build(
            sample_size=64, attention_head_dim=(5, 10, 20, 20), cross_attention_dim=1024,
            use_linear_projection=True,
        ).half()  # fmt: skip
        example = {
            "sample": torch.empty(1, 4, 64, 64, dtype=torch.half),
            "timestep": torch.empty(1, dtype=torch.long),
            "encoder_hidden_states": torch.empty(1, 77, 1024, dtype=torch.half),
        }
    cuts = dp.chain(model).cuts(name, **example)
    return max(cut.hidden_bytes + cut.skip_bytes for cut in cuts)


def bench_bytes(benchmark, record_claim):
    found, frames = {}, {}

    def run():
        for placement in ("chain", "folded"):
            with (
                NetLab(hosts=2, rate=RATE) as lab,
                lab.pool(timeout=timedelta(minutes=5)) as pool,
            ):
                pool.run(prepare)
                before = sum(one.tx_bytes for one in lab.counters())
                found[placement] = pool.run(count, placement).results[0]
                frames[placement] = sum(one.tx_bytes for one in lab.counters()) - before

    benchmark.pedantic(run, rounds=1)
    totals = {}
    for placement, (planned, counted, losses, _) in found.items():
        totals[placement] = sum(counted.values())
        off = max(abs(counted.get(edge, 0) - planned[edge]) for edge in planned)
        # The losses are those of both placements, so that the same training was counted.
        others = found["folded" if placement == "chain" else "chain"][2]
        is_same = all(abs(a - b) <= 1e-3 * b for a, b in zip(losses, others, strict=True))
        record_claim(
            Claim(
                name=f"bytes of a training step between two hosts, {placement}", unit="bytes",
                ours=totals[placement], baseline=sum(planned.values()), baseline_name="planned",
                higher_is_better=False,
                correct=is_same and len(set(losses)) == STEPS and off == 0
                and set(counted) == set(planned)
                # Headers are a twentieth; agreements and reports take less than 3 MB.
                and frames[placement] / (STEPS * totals[placement]) > 1
                and frames[placement] < 1.08 * STEPS * totals[placement] + 3e6,
                detail=f"batch {BATCH} in {COUNT} micro-batches, {STEPS} steps; by edge {counted}; largest "
                f"difference {off:.0f} bytes; all frames of the run {frames[placement]:,} bytes",
                source=COMMAND,
            ),
            aim=1.0,
        )  # fmt: skip
    record_claim(
        Claim(
            name="bytes of a folded plan's step", unit="bytes", ours=totals["folded"],
            baseline=totals["chain"], baseline_name="a chain's, the same batch",
            higher_is_better=False, correct=0 < totals["folded"] < totals["chain"],
            detail=f"{totals['folded'] / totals['chain']:.3f} of the chain's at {RATE}; plans for other links: "
            + ", ".join(f"{name} {share:.2f}" for name, share in found["folded"][3].items())
            + "; the planner saves seconds, and bytes only where they cost some; SD 2.1's largest cut, on meta "
            f"tensors: {find_cut_bytes('folded'):,} of {find_cut_bytes('chain'):,} bytes a sample",
            source=COMMAND,
        ),
        aim=1 / SHARE,
    )  # fmt: skip
