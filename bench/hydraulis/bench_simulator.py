"""Simulated seconds beside measured ones: training steps on two ranks, and 1F1B pipelines of four.

Steps: steps of eight draws of Python's own source files run under three plans each: ours, packed in random
order, and ours where every document above 1,024 tokens lies over both ranks by ring attention. Between the
draws a profile is measured: a cost, of micro-batches of other files on both ranks; the exchange of gradients
with the update; and what a token of a document over both ranks takes in messages. No profile contains a step
that is simulated; simulated seconds are medians over the profiles, measured ones over the turns.
Pipelines: stages sleep for what a micro-batch is to take, so that nothing but the order of passes and
messages decides; each plan packs documents drawn from a lognormal distribution.
"""

import sys
import time
from collections import deque
from dataclasses import replace
from datetime import timedelta
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

from small_model import SumOfGradients, agreed_cost, documents, make_model, relative_error

CAP, TOKENS, DRAWS, TURNS, ROWS = 2048, 6_000, 8, 3, 8
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


def rows_of_others(lengths, draw):
    """Micro-batches packed in order of documents, from a tenth full to full."""
    rows, waiting = [], deque(lengths)
    for _ in range(ROWS):
        room, row = draw.uniform(0.1, 1.0) * CAP, [waiting.popleft()]
        while sum(row) + waiting[0] <= room:
            row.append(waiting.popleft())
        rows.append(row)
    return rows


def profile(engine, model, rows, long):
    """A cost, seconds of a step beside its micro-batches, and of messages for each token over both ranks.

    The model is another one than the engine's. Beside micro-batches there are agreement, exchange of
    gradients, update.
    """
    cost = hy.measure_cost(model, CAP, repeats=1, micro_batches=rows)
    tiny, one = [bytes(range(16))] * 2, [bytes(long)]
    both = with_plan([long], [[MicroBatch(first=0, degree=2, documents=(0,))]] * 2)
    overhead_s = measured(engine, tiny, engine.plan([16, 16]))[0] - cost.micro_batch_s([16])
    alone_s = overhead_s + cost.c + cost.sequence_s([long])[0] / 2
    message_s = (measured(engine, one, both)[0] - alone_s) / long
    return cost, max(overhead_s, 0.0), max(message_s, 0.0)


def predicted(plan, profiles):
    """Simulated seconds: the median over profiles."""
    return median(
        overhead_s
        + simulate(placed(plan), 2, DegreeCost(cost=cost, cap=CAP, message_s={2: message_s})).max()
        for cost, overhead_s, message_s in profiles
    )


def run_steps():
    """Of every plan, simulated seconds, measured ones with losses and errors of gradients by turn; profiles.

    Gradients are compared with those of the draw's first step.
    """
    torch.set_num_threads(1)
    every, draw = documents(CAP), np.random.default_rng(0)
    engine = hy.Engine(make_model(CAP), SumOfGradients, max_tokens=CAP, cost=agreed_cost(CAP))
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
    others, model = [len(every[i]) for i in order[at:]], make_model(CAP)
    profiles, taken, known = [], [[] for _ in steps], {}
    for turn in range(TURNS + 1):
        for number, step in enumerate(steps):
            if number % 3 == 0:
                rows = rows_of_others(draw.permutation(others).tolist(), draw)
                found = profile(engine, model, rows, int(draw.uniform(LONG, CAP)))
                engine.optimizer.taken()
                profiles += [found] if turn else []
            seconds, loss = measured(engine, *step)
            gradient = engine.optimizer.taken()
            error = relative_error(gradient, known.setdefault(number // 3, gradient.double()))
            if turn:
                taken[number].append((seconds, loss, error))
    simulated = [predicted(plan, profiles) for _, plan in steps]
    shared = sum(any(one.degree == 2 for one in plan.micro_batches[0]) for _, plan in steps)
    return simulated, taken, shared, profiles


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
            lambda: pool.run(run_steps, timeout=timedelta(minutes=15)).results, rounds=1
        )
    simulated, taken, shared, profiles = results[0]
    seconds = np.array([median(one for one, _, _ in turns) for turns in taken])
    losses, errors = (np.array([[one[at] for one in turns] for turns in taken]) for at in (1, 2))
    # The three plans of a draw compute the same documents, so their losses and gradients are one.
    losses = losses.reshape(DRAWS, 3 * TURNS)
    spread = float((losses.max(axis=1) / losses.min(axis=1) - 1).max())
    cost = [
        median(values) for values in zip(*((c.a, c.b, c.c) for c, _, _ in profiles), strict=True)
    ]
    overhead_s, message_s = (median(one[at] for one in profiles) for at in (1, 2))
    ratios = np.array(simulated) / seconds
    kinds = [f"{median(ratios[kind::3]):.3f}" for kind in range(3)]
    record(
        record_claim,
        "seconds of 24 plans on 2 ranks, simulated: mean error",
        (100 * np.abs(ratios - 1)).tolist(),
        5.0,
        is_right=spread < 1e-4
        and bool((errors < 1e-4).all())
        and len(set(losses[:, 0].tolist())) == DRAWS
        and shared >= DRAWS // 2,
        detail=f"steps of {min(seconds):.2f} to {max(seconds):.2f} s, medians of {TURNS} turns; {shared} plans "
        f"with documents over both ranks; simulated over measured, medians of ours, at random and over both: "
        f"{', '.join(kinds)}; cost {cost[0]:.3g} s^2 + {cost[1]:.3g} s + {cost[2]:.3g}, "
        f"{1e3 * overhead_s:.1f} ms a step, {1e6 * message_s:.2g} us of messages a token, medians of "
        f"{len(profiles)} profiles; correct if the plans of a draw have one loss and one gradient, not 0",
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
