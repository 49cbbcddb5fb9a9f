"""A training step whose operators between two collectives are compiled by Inductor, against the same operators.

Two ranks of one machine without a limited link, a core each; a Qwen3-MoE of four layers over Bible text,
AdamW. One capture runs the planned order operator by operator and in compiled regions, in turns; the
uncompiled order also runs against itself. A step is the slower rank's, a barrier before each. Each rank
compiles into an empty folder of its own.
"""

import os
import sys
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

import lancet
from lancet.report import RegionsReport
from shared.claims import Claim, pair_turns
from shared.comms import Group, RankPool
from shared.comms.handicap import handicap

sys.path.insert(0, str(Path(__file__).parent))

from moe_jobs import Job, Step, Turns, build, compare_gradients, take_turns, typical

PEERS = [
    {
        "peer": "the same operators, uncompiled",
        "setting": "the same capture, plan, exchange and weights",
        "why": "a model compiled whole by Inductor gives no order to its collectives",
    },
]
TURNS, SIZES = 9, Job()
REGIONS, UNCOMPILED, AGAIN = "regions", "planned", "planned again"
NAME = "the same operators, uncompiled"
MOST_DIFFERENCE = 1e-4
"""Between a gradient and the uncompiled operators', relative to its largest element."""
COMMAND = "hatch run bench lancet/regions"


class Measured(NamedTuple):
    """One rank's results."""

    turns: Turns
    difference: float
    regions: RegionsReport
    sentences: tuple[str, ...]


def run(job: Job, num_turns: int, folder: str) -> Measured:
    torch.set_num_threads(1)
    group = Group.world()
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{folder}/rank{group.rank}"
    model = lancet.parallelize(build(job), group)
    backend = lancet.Backend(group, partition=None, regions=True)
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    orders = {UNCOMPILED: "planned", AGAIN: "planned", REGIONS: "regions"}
    ways = {
        name: Step(compiled, model, optimizer, backend, order) for name, order in orders.items()
    }
    batches = job.batches(group.rank)
    batch = next(batches)
    ways[REGIONS].differentiate(batch)
    (_, (_, difference)) = compare_gradients([ways[UNCOMPILED], ways[REGIONS]], batch)
    turns = take_turns(ways, batches, num_turns, num_warm=2)
    report = backend.report()
    assert report.regions is not None
    return Measured(turns, difference, report.regions, report.sentences)


@pytest.mark.parametrize("expert_width", [256, 768])
def bench_regions(benchmark, record_claim, tmp_path, expert_width):
    job = replace(SIZES, expert_width=expert_width)
    words = [handicap(cores=[0]), handicap(cores=[1])]
    modules = ("transformers.models.qwen3_moe.modeling_qwen3_moe", "torch.distributed.tensor")
    with RankPool(2, prefix=words, timeout=timedelta(minutes=15), modules=modules) as pool:
        ranks = benchmark.pedantic(
            lambda: pool.run(run, job, TURNS, str(tmp_path)).results, rounds=1
        )
    seconds = {
        name: [max(own) for own in zip(*(r.turns.seconds[name] for r in ranks), strict=True)]
        for name in (UNCOMPILED, AGAIN, REGIONS)
    }
    first = ranks[0]
    correct = all(
        0 < rank.difference < MOST_DIFFERENCE
        and not rank.sentences
        and rank.regions.num_regions > 0
        and rank.turns.losses[-1] < rank.turns.losses[0]
        for rank in ranks
    )
    steps = ", ".join(f"{name} {typical(own)}" for name, own in seconds.items())
    detail = (
        f"{job.num_layers} layers of {job.hidden_size}, {job.num_experts} experts of {expert_width}, "
        f"{job.num_sequences * job.num_tokens} tokens a rank; {first.regions.num_regions} regions by "
        f"{first.regions.num_compiled} functions, compiled in {first.regions.compile_s:.0f} s; gradients "
        f"differ by {max(rank.difference for rank in ranks):.1e} of their largest element; seconds of "
        f"{TURNS} turns, median and range: {steps}"
    )
    source = f'{COMMAND} -k "{expert_width}"'
    for ours, name in ((REGIONS, "in compiled regions"), (AGAIN, "uncompiled, against itself")):
        record_claim(
            Claim(
                name=f"training step {name}, experts of {expert_width}", unit="s", baseline_name=NAME,
                correct=correct, detail=detail, source=source,
                **pair_turns(seconds[ours], seconds[UNCOMPILED]),
            ),
        )  # fmt: skip
