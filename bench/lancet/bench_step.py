"""A whole training step on two hosts at 100 Mbit/s: orders of one capture in turns, and eager expert parallelism.

Two ranks, a core each; a Qwen3-MoE of four layers over Bible text, AdamW, its experts divided so that both
ranks get about as many rows. Experts are made as wide as gives communication / computation of about 0.3,
0.5 and 1.0. All orders run the same captured graphs, exchange and weights, and are made of the same measured
times: the captured one; starts of communication hoisted and waits sunk; Inductor's overlap pass; ours, which also sums gradients in groups; and
the captured and Inductor's order with sums in groups by the same search. A step is the slower rank's, a barrier before each; the captured order also runs against itself. Exposed seconds are
those that ranks waited for collectives, their mean. No order takes less than the larger of computation and
communication.
"""

import sys
from datetime import timedelta
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple

import pytest
import torch

from shared.claims import Claim, pair_turns
from shared.comms import Group, NetLab, netlab
from shared.comms.handicap import handicap

# What lies beside a benchmark is no module of a package.
sys.path.insert(0, str(Path(__file__).parent))

from eager_ways import make_ours, make_transformers
from moe_jobs import (
    GROUPED,
    GROUPED_INDUCTOR,
    HOISTED,
    INDUCTOR,
    Costs,
    Job,
    Step,
    Turns,
    add_rivals,
    compare_gradients,
    measure_costs,
    take_turns,
    typical,
)
from widths import compile_step, find_job

pytestmark = [
    pytest.mark.netns,
    pytest.mark.skipif(netlab.available() is not None, reason=str(netlab.available())),
]

PEERS = [
    {
        "peer": "Inductor's overlap pass",
        "setting": "torch 2.13, its own limits of memory and distance, no bucketing; fed our measured times, "
        "experts' products entered as computation, waits at their first readers",
        "why": "without measured times it needs a GPU, and waits where it puts them end earlier than they must",
    },
    {
        "peer": "transformers' AllToAllEP",
        "setting": "eager, gloo's all-to-all, DDP with 25 MB buckets for what all ranks have",
        "why": "its own exchange cannot be captured; FSDP2 would send more",
    },
]
RATE, TURNS = "100mbit", 7
RATIO_ERROR = 0.3
"""Most by which the measured ratio may miss the one asked for."""
EAGER_AT = 0.5
"""Ratio at which eager ways run too."""
SIZES = Job()
OURS, CAPTURED, AGAIN = "ours", "captured order", "captured order again"
PARTS = "ours, in parts where they pay"
OURS_EAGER, THEIRS_EAGER = "our exchange, eager", "transformers' exchange, eager"
REVISION = 2
COMMAND = "hatch run bench lancet/step"


class Measured(NamedTuple):
    """One rank's results."""

    job: Job
    turns: Turns
    costs: Costs
    same_bits: dict[str, bool]
    differences: dict[str, float]
    first_losses: dict[str, float]
    num_moved: int
    parts: str


def run(sizes: Job, ratio: float, bytes_per_s: float, num_turns: int) -> Measured:
    torch.set_num_threads(1)
    group = Group.world()
    job = find_job(sizes, ratio, bytes_per_s)
    ours = compile_step(job, group, partition=None)
    compiled, model, optimizer, backend = ours.run, ours.model, ours.optimizer, ours.backend
    assert backend is not None
    ways = {
        name: Step(compiled, model, optimizer, backend, order)
        for name, order in (
            (CAPTURED, "captured"),
            (AGAIN, "captured"),
            (HOISTED, HOISTED),
            (INDUCTOR, INDUCTOR),
            (GROUPED, GROUPED),
            (GROUPED_INDUCTOR, GROUPED_INDUCTOR),
            (OURS, "planned"),
        )
    }
    ways[PARTS] = compile_step(job, group, partition="auto")
    batches = job.batches(group.rank)
    batch = next(batches)
    first_losses = {name: ways[name].differentiate(batch) for name in (OURS, PARTS)}
    add_rivals(backend)
    if ratio == EAGER_AT:
        ways[OURS_EAGER] = make_ours(model, optimizer)
        ways[THEIRS_EAGER] = make_transformers(job)
        first_losses[THEIRS_EAGER] = ways[THEIRS_EAGER].differentiate(batch)
    own = {name: way for name, way in ways.items() if way.model is model}
    compared = compare_gradients(list(own.values()), batch)
    turns = take_turns(ways, batches, num_turns)
    moved = [len(names) for plan in backend.plans.values() for names in plan.moved.values()]
    return Measured(
        job,
        turns,
        measure_costs(backend, median(ways[CAPTURED].optimizer_s)),
        {name: is_equal for name, (is_equal, _) in zip(own, compared, strict=True)},
        {name: difference for name, (_, difference) in zip(own, compared, strict=True)},
        first_losses,
        sum(moved),
        ways[PARTS].describe_batch(),
    )


class Outcome:
    """Results of all ranks, and what claims need of them."""

    def __init__(self, ranks: list[Measured], ratio: float) -> None:
        self.ranks, self.ratio = ranks, ratio
        self.costs = ranks[0].costs
        names = list(ranks[0].turns.seconds)
        self.seconds = {
            name: [max(own) for own in zip(*(r.turns.seconds[name] for r in ranks), strict=True)]
            for name in names
        }
        self.waits_s = {
            name: [mean(own) for own in zip(*(r.turns.waits_s[name] for r in ranks), strict=True)]
            for name in names
        }

    def is_right(self, name: str) -> bool:
        """Whether a way trained: it sent what the captured order sends, and has its gradients."""
        first = self.ranks[0]
        losses = first.first_losses
        has_loss = name not in losses or abs(losses[name] - losses[OURS]) < 1e-4
        if name == THEIRS_EAGER:
            return has_loss and median(self.seconds[name]) > 0
        sent = first.turns.sent_bytes
        # Routing differs a little from step to step, as weights do.
        close = abs(median(sent[name]) / max(median(sent[CAPTURED]), 1) - 1) < 0.05
        if name == PARTS:
            return has_loss and close
        is_exact = name == OURS_EAGER or all(rank.same_bits[name] for rank in self.ranks)
        is_near = all(rank.differences[name] < 1e-4 for rank in self.ranks)
        return close and is_exact and is_near and first.turns.losses[-1] < first.turns.losses[0]

    @property
    def is_measured_where_asked(self) -> bool:
        return abs(self.costs.ratio / self.ratio - 1) < RATIO_ERROR

    def describe(self) -> str:
        costs, job = self.costs, self.ranks[0].job
        steps = ", ".join(f"{name} {typical(own)}" for name, own in self.seconds.items())
        waits = ", ".join(
            f"{name} {typical(own)}" for name, own in self.waits_s.items() if any(own)
        )
        return (
            f"{job.num_layers} layers of {job.hidden_size}, {job.num_experts} experts of "
            f"{job.expert_width}, {job.num_sequences * job.num_tokens} tokens a rank; measured: operators "
            f"{costs.compute_s:.3f} s, optimizer {costs.optimizer_s:.3f} s, communication "
            f"{costs.communication_s:.3f} s, ratio {costs.ratio:.2f}; no order below {costs.limit_s:.3f} s; "
            f"{self.ranks[0].num_moved} operations moved; {self.ranks[0].parts}; seconds of {TURNS} turns, median and range: {steps}; "
            f"waited: {waits}"
        )


@pytest.fixture
def lab_pool():
    words = [handicap(cores=[0]), handicap(cores=[1])]
    modules = ("transformers.models.qwen3_moe.modeling_qwen3_moe", "torch.distributed.tensor")
    with (
        NetLab(hosts=2, rate=RATE) as lab,
        lab.pool(handicaps=words, timeout=timedelta(minutes=9), modules=modules) as pool,
    ):
        yield lab, pool


@pytest.mark.parametrize("ratio", [0.3, 0.5, 1.0])
def bench_step(lab_pool, benchmark, record_claim, ratio):
    lab, pool = lab_pool
    ranks = benchmark.pedantic(
        lambda: pool.run(run, SIZES, ratio, lab.bytes_per_s, TURNS).results, rounds=1
    )
    outcome = Outcome(ranks, ratio)
    aims: dict[str, float | None] = {
        CAPTURED: 1.25, HOISTED: None, INDUCTOR: 1.1, GROUPED: None, GROUPED_INDUCTOR: 1.1,
    }  # fmt: skip
    eager = [name for name in (OURS_EAGER, THEIRS_EAGER) if name in outcome.seconds]
    common: dict[str, Any] = {
        "unit": "s",
        "detail": outcome.describe(),
        "source": f'{COMMAND} -k "{ratio}"',
    }
    where = f"communication / computation {ratio}"
    is_right = outcome.is_measured_where_asked and outcome.is_right(OURS)
    is_right = is_right and ranks[0].num_moved > 0
    for baseline in (*aims, *eager):
        figures = pair_turns(outcome.seconds[OURS], outcome.seconds[baseline])
        record_claim(
            Claim(
                name=f"training step, 100 Mbit/s, {where}", baseline_name=baseline,
                correct=is_right and outcome.is_right(baseline), **figures, **common,
            ),
            aim=aims.get(baseline) if ratio == EAGER_AT else None,
        )  # fmt: skip
    for baseline in (CAPTURED, INDUCTOR, OURS):
        figures = pair_turns(outcome.seconds[PARTS], outcome.seconds[baseline])
        record_claim(
            Claim(
                name=f"training step in parts where they pay, 100 Mbit/s, {where}",
                baseline_name=baseline, **figures, **common,
                correct=is_right and outcome.is_right(PARTS) and outcome.is_right(baseline),
            ),
        )  # fmt: skip
    for baseline, aim in ((CAPTURED, 2.5 if ratio <= EAGER_AT else None), (INDUCTOR, None)):
        figures = pair_turns(outcome.waits_s[OURS], outcome.waits_s[baseline])
        record_claim(
            Claim(
                name=f"exposed seconds of a step, 100 Mbit/s, {where}", baseline_name=baseline,
                correct=is_right and outcome.is_right(baseline), **figures, **common,
            ),
            aim=aim,
        )  # fmt: skip
    figures = pair_turns(outcome.seconds[AGAIN], outcome.seconds[CAPTURED])
    record_claim(
        Claim(
            name=f"captured order against itself, {where}", baseline_name=CAPTURED,
            correct=outcome.is_right(CAPTURED) and outcome.is_right(AGAIN), **figures, **common,
        ),
    )  # fmt: skip
    limits = [outcome.costs.limit_s / own for own in outcome.seconds[OURS]]
    record_claim(
        Claim(
            name=f"share reached of the limit of a step, {where}", ours=median(limits),
            baseline=outcome.costs.limit_s / median(outcome.seconds[CAPTURED]),
            baseline_name="the captured order's share", higher_is_better=True, correct=is_right,
            **(common | {"unit": "share"}),
        ),
    )  # fmt: skip
    for faster, slower, what in (
        (CAPTURED, OURS_EAGER, "capture alone"),
        (OURS_EAGER, THEIRS_EAGER, "rounds alone"),
    ):
        if slower in outcome.seconds:
            figures = pair_turns(outcome.seconds[faster], outcome.seconds[slower])
            record_claim(
                Claim(
                    name=f"training step by {what}, {where}", baseline_name=slower,
                    correct=outcome.is_right(faster) and outcome.is_right(slower),
                    **figures, **common,
                ),
            )  # fmt: skip
