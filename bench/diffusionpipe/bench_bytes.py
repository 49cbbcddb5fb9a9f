"""Bytes of a training step between two hosts: counted beside planned, folded beside chain.

A U-Net of three levels, whose skips weigh as SD's do, trains for some steps by two plans. The engine's ledger counts
what each rank sends in messages, and the hosts' devices count all frames. A folded plan holds both ends of
a skip on one rank, so that only hidden states and embeddings travel.
"""

import sys
from datetime import timedelta
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

import diffusionpipe as dp
from diffusionpipe.data import build_pipeline, iterate_batches, load_digits
from shared.claims import Claim
from shared.comms import NetLab, netlab

sys.path.insert(0, str(Path(__file__).parent))

from small_sd import SEED, fit_cluster, make_optimizer

pytestmark = [
    pytest.mark.netns,
    pytest.mark.skipif(netlab.available() is not None, reason=str(netlab.available())),
]

BATCH, STEPS, COUNT = 8, 3, 4
CHANNELS, IMAGE_SIZE = (64, 128, 256), 64
"""Levels that halve as SD's do, so that the outer device's layers take about half of the time."""
SHARE = 0.25
"""Of a folded plan's bytes in a chain's."""
COMMAND = "hatch run bench diffusionpipe/bytes"


def iterate():
    """Batches without end, the same on both ranks."""
    return iterate_batches(load_digits(IMAGE_SIZE), BATCH, seed=SEED)


def make_plans():
    torch.set_num_threads(1)
    pipeline = build_pipeline(channels=CHANNELS, image_size=IMAGE_SIZE, seed=SEED)
    job = dp.Job.from_pipeline(pipeline)
    profile = dp.profile(job, next(iterate()), sizes=(1, BATCH // COUNT), repeats=2)
    cluster = fit_cluster(has_hosts=True)
    return job, {
        placement: dp.plan(
            job, profile, cluster, batch_size=BATCH, placement=placement, num_stages=2,
            num_micro_batches=COUNT,
        )
        for placement in ("chain", "folded")
    }  # fmt: skip


def count(placement):
    """Bytes by edge as planned and as counted, and the losses."""
    job, plans = make_plans()
    engine = dp.Engine(job, plans[placement], make_optimizer, seed=SEED)
    # Behind the last batch nothing is encoded, so that steps and encoded batches are as many.
    losses = list(engine.steps(islice(iterate(), STEPS)))
    report = engine.report()
    return dict(plans[placement].edges), dict(report.edges), losses


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
                NetLab(hosts=2, rate="100mbit") as lab,
                lab.pool(timeout=timedelta(minutes=5)) as pool,
            ):
                found[placement] = pool.run(count, placement).results[0]
                frames[placement] = sum(one.tx_bytes for one in lab.counters())

    benchmark.pedantic(run, rounds=1)
    totals = {}
    for placement, (planned, counted, losses) in found.items():
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
                # Headers are a twentieth; agreements and the start have a hundredth and 3 MB.
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
            detail=f"{totals['folded'] / totals['chain']:.3f} of the chain's; SD 2.1's largest cut, on meta "
            f"tensors: {find_cut_bytes('folded'):,} of {find_cut_bytes('chain'):,} bytes a sample",
            source=COMMAND,
        ),
        aim=1 / SHARE,
    )  # fmt: skip
