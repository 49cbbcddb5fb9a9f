"""Simulated seconds beside measured ones: training steps on two ranks, and 1F1B pipelines of four.

Steps: a cost is measured on both ranks, and the exchange of gradients with the update; then steps of eight
draws of Python's own source files run under three plans each: ours, packed in random order, and ours where
every document above 1,024 tokens lies over both ranks by ring attention. What a token of these takes in
messages comes from one such document, which is in no plan.
Pipelines: stages sleep for what a micro-batch is to take, so that nothing but the order of passes and
messages decides; each plan packs documents drawn from a lognormal distribution.
"""

import sys
import time
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np
import torch

import hydraulis as hy
from hydraulis.planner.degrees import DegreeCost
from hydraulis.planner.schedule import MicroBatch, StepPlan
from hydraulis.runtime.engine import PlannedStep
from hydraulis.simulator import PlacedMicroBatch, simulate
from shared.claims import Claim
from shared.comms import Group, RankPool, barrier
from shared.comms.handicap import handicap
from shared.comms.pipeline import run_1f1b

sys.path.insert(0, str(Path(__file__).parent))

from small_model import agreed_cost, documents, make_model

CAP, TOKENS, DRAWS, TURNS = 2048, 6_000, 8, 3
LONG = 1024
STAGES, PIPELINES = 4, 20
COMMAND = "hatch run bench hydraulis -k simulator"


def placed(plan):
    """A step's micro-batches as the simulator takes them, each group's once."""
    return [
        PlacedMicroBatch(
            first=one.first, degree=one.degree,
            lengths=tuple(plan.lengths[i] for i in one.documents),
        )
        for rank, queue in enumerate(plan.micro_batches)
        for one in sorted(queue, key=lambda one: -one.degree)
        if one.first == rank and one.documents
    ]  # fmt: skip


def with_plan(lengths, queues):
    return StepPlan(
        lengths=tuple(lengths), micro_batches=tuple(map(tuple, queues)), seconds=np.zeros(2),
        makespan_s=0.0, bound_s=0.0,
    )  # fmt: skip


def alone(rank, indices):
    return MicroBatch(first=rank, degree=1, documents=tuple(indices))


def packed_at_random(lengths, draw):
    """Rows in random order, dealt in turn."""
    rows = [[]]
    for i in draw.permutation(len(lengths)).tolist():
        if sum(lengths[j] for j in rows[-1]) + lengths[i] > CAP:
            rows.append([])
        rows[-1].append(i)
    queues = [[alone(rank, row) for row in rows[rank::2]] for rank in range(2)]
    return with_plan(lengths, [queue or [alone(rank, ())] for rank, queue in enumerate(queues)])


def over_both(lengths, engine):
    """Documents above `LONG` over both ranks, the others as planned without them."""
    long = [i for i, n in enumerate(lengths) if n > LONG]
    short = [i for i, n in enumerate(lengths) if n <= LONG]
    shared = [MicroBatch(first=0, degree=2, documents=(i,)) for i in long]
    inner = engine.plan([lengths[i] for i in short])
    queues = [
        shared + [replace(one, documents=tuple(short[i] for i in one.documents)) for one in queue]
        for queue in inner.micro_batches
    ]
    return with_plan(lengths, queues)


def measured(engine, texts, plan):
    """Seconds of a step between barriers, and its loss."""
    group = Group.world()
    step = PlannedStep(documents=texts, indices=tuple(range(len(texts))), plan=plan)
    barrier(group)
    begun = time.perf_counter()
    loss = engine.step(step).loss
    barrier(group)
    return time.perf_counter() - begun, loss


def run_steps():
    """Of every plan, simulated seconds, measured ones by turn, and losses; plans that use both ranks."""
    torch.set_num_threads(1)
    cost, every = agreed_cost(CAP), documents(CAP)
    engine = hy.Engine(make_model(CAP), partial(torch.optim.SGD, lr=0.0), max_tokens=CAP, cost=cost)
    # Beside micro-batches: agreement, exchange of gradients, update; then messages for each token.
    tiny, one = [bytes(range(16))] * 2, [bytes(1600)]
    both = with_plan([1600], [[MicroBatch(first=0, degree=2, documents=(0,))]] * 2)
    overhead_s = median(
        measured(engine, tiny, engine.plan([16, 16]))[0] - cost.micro_batch_s([16])
        for _ in range(2 * TURNS)
    )
    message_s = median(
        (measured(engine, one, both)[0] - overhead_s - cost.c - cost.sequence_s([1600])[0] / 2)
        / 1600
        for _ in range(2 * TURNS)
    )
    degrees = DegreeCost(cost=cost, cap=CAP, message_s={2: max(message_s, 0.0)})
    draw = np.random.default_rng(0)
    order, at = draw.permutation(len(every)).tolist(), 0
    steps = []
    for _ in range(DRAWS):
        texts = []
        while sum(map(len, texts)) < TOKENS:
            texts.append(every[order[at]])
            at += 1
        lengths = [len(text) for text in texts]
        for plan in (
            engine.plan(lengths), packed_at_random(lengths, draw), over_both(lengths, engine),
        ):  # fmt: skip
            steps.append((texts, plan))
    simulated = [overhead_s + simulate(placed(plan), 2, degrees).max() for _, plan in steps]
    taken = [[measured(engine, *step) for step in steps] for _ in range(TURNS + 1)][1:]
    shared = sum(any(one.degree == 2 for one in plan.micro_batches[0]) for _, plan in steps)
    return simulated, taken, shared, (cost.a, cost.b, cost.c, overhead_s, message_s)


class Sleep(torch.autograd.Function):
    """Passes states on, after so many seconds forward and so many backward."""

    @staticmethod
    def forward(ctx, x, forward_s, backward_s):
        ctx.backward_s = backward_s
        nap(forward_s)
        return x.clone()

    @staticmethod
    def backward(ctx, *grads):
        nap(ctx.backward_s)
        return *grads, None, None


def nap(seconds):
    """Sleeps, less what waking up takes too long."""
    end = time.perf_counter() + seconds
    time.sleep(max(seconds - 2e-3, 0.0))
    while time.perf_counter() < end:
        time.sleep(5e-5)


def run_pipelines(plans):
    """Seconds of each pipeline, from when all stages begin until the last one ends."""
    group, taken = Group.world(), []
    for micro_batches in plans:

        def forward(k, states, micro_batches=micro_batches):
            x = torch.ones(1, 8, 16, requires_grad=True) if states is None else states
            out = Sleep.apply(x, micro_batches[k] / 3, micro_batches[k] * 2 / 3)
            return out.sum() if group.rank == STAGES - 1 else out

        barrier(group)
        begun = time.perf_counter()
        run_1f1b(group, [(1, 8, 16)] * len(micro_batches), forward, dtype=torch.float32)
        barrier(group)
        taken.append(time.perf_counter() - begun)
    return taken


def record(record_claim, name, errors, aim, *, is_right, detail):
    record_claim(
        Claim(
            name=name, unit="%", ours=float(np.mean(errors)), baseline=aim,
            baseline_name="the aim", higher_is_better=False, correct=bool(is_right),
            detail=f"largest {max(errors):.1f} %; {detail}", source=COMMAND,
        ),
        aim=1.0,
        spread=(aim / float(max(errors)), aim / max(float(min(errors)), 1e-9)),
    )  # fmt: skip


def bench_simulator_steps(benchmark, record_claim):
    words = [handicap(cores=[0]), handicap(cores=[1])]
    with RankPool(2, prefix=words) as pool:
        results = benchmark.pedantic(
            lambda: pool.run(run_steps, timeout=timedelta(minutes=10)).results, rounds=1
        )
    simulated, taken, shared, (a, b, c, overhead_s, message_s) = results[0]
    seconds = np.median([[one for one, _ in turn] for turn in taken], axis=0)
    losses = np.array([[loss for _, loss in turn] for turn in taken])
    # The three plans of a draw compute the same documents, so their losses are one.
    groups = losses.reshape(TURNS, DRAWS, 3)
    spread = float((groups.max(axis=(0, 2)) / groups.min(axis=(0, 2)) - 1).max())
    record(
        record_claim,
        "seconds of 24 plans on 2 ranks, simulated: mean error",
        (100 * np.abs(np.array(simulated) / seconds - 1)).tolist(),
        5.0,
        is_right=spread < 1e-4
        and len(set(groups[0, :, 0].tolist())) == DRAWS
        and shared >= DRAWS // 2,
        detail=f"steps of {min(seconds):.2f} to {max(seconds):.2f} s, medians of {TURNS} turns; {shared} plans "
        f"with documents over both ranks; cost {a:.3g} s^2 + {b:.3g} s + {c:.3g}, {1e3 * overhead_s:.1f} ms a "
        f"step, {1e6 * message_s:.2g} us of messages a token; correct if the plans of a draw have one loss",
    )


def bench_simulator_pipelines(benchmark, record_claim):
    draw, plans = np.random.default_rng(0), []
    cost = hy.Cost(a=2e-8, b=2e-5, c=0.01)
    for _ in range(PIPELINES):
        lengths = np.clip(np.exp(draw.normal(6.5, 1.0, 24)), 16, 4096).astype(int)
        packing = hy.pack(lengths, cost, 4096, STAGES)
        plans.append([cost.micro_batch_s(lengths[list(one)]) for one in packing.micro_batches])
    with RankPool(STAGES, timeout=timedelta(minutes=5)) as pool:
        every = benchmark.pedantic(
            lambda: [pool.run(run_pipelines, plans).results for _ in range(TURNS)], rounds=1
        )
    seconds = np.median([np.max(of_ranks, axis=0) for of_ranks in every], axis=0)
    simulated = np.array([hy.pipeline_s(plan, STAGES) for plan in plans])
    alone_s = np.array([sum(plan) for plan in plans])
    record(
        record_claim,
        f"seconds of {PIPELINES} pipelines of 4 stages, 1F1B, simulated: mean error",
        (100 * np.abs(simulated / seconds - 1)).tolist(),
        3.0,
        is_right=(seconds > alone_s).all(),
        detail=f"{min(map(len, plans))} to {max(map(len, plans))} unequal micro-batches, {min(seconds):.2f} to "
        f"{max(seconds):.2f} s, medians of {TURNS} turns; stages sleep; correct if no pipeline ends before its "
        f"longest stage could",
    )  # fmt: skip
