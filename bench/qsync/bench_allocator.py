"""Planning 500 operators: seconds, noise beside HiGHS's, and a trial beside building everything anew.

Two graphs of 500 linear operators with the adds and norms between them, or without: kernels by sizes of
transformers' layers, casts by elements, noises over magnitudes as wide as real layers'. Both solvers get the same
costs and the same limit of time; HiGHS is given a minute for each.
"""

import time
from statistics import median

import numpy as np
import pytest

from qsync import CostMapper, Graph, Op
from qsync.planner.milp import solve
from qsync.planner.ranks import RankCosts, allocate
from qsync.planner.replayer import GradientBuckets, RankSeconds, StepReplay
from shared.claims import Claim

PEERS = [
    {
        "peer": "HiGHS",
        "setting": "scipy's milp, one binary variable an operator and precision, casts as shares of pairs, "
        "which makes the relaxation exact on chains and trees; a minute a problem",
        "why": "its bound says how far from the least noise a plan can be at most",
    }
]
NUM_LINEARS, SHARES = 500, (0.5, 0.7, 0.9)
"""Shares of float32's step that plans are asked for."""
PRECISIONS = ["int8", "bf16", "fp32"]
SPEEDS = {"int8": 0.35, "bf16": 0.5, "fp32": 1.0}
BYTES = {"int8": 1, "bf16": 2, "fp32": 4}
FLOPS_PER_S, BYTES_PER_S, LAUNCH_S = 5e10, 5e9, 5e-6
TOKENS, TRIALS = 1024, 300
COMMAND = "hatch run bench qsync/allocator"


def make_graph(kind):
    """A chain of linears, or layers of transformers with four reads of one norm and two adds."""
    ops = []
    widths = (384, 384, 384, 384, 1536, 384)

    def add(name, op_kind, inputs, dim, weight_numel=0):
        ops.append(Op(name, op_kind, inputs=inputs, numel=TOKENS * dim, weight_numel=weight_numel))
        return name

    if kind == "chain":
        latest = ()
        for i in range(NUM_LINEARS):
            width = widths[i % len(widths)]
            latest = (add(f"linear{i}", "linear", latest, width, 384 * width),)
        return Graph(ops)
    count, latest = 0, add("input", "fixed", (), 384)

    def linear(inputs, inner, outer):
        nonlocal count
        count += 1
        return add(f"linear{count - 1}", "linear", inputs, outer, inner * outer)

    while count + 6 <= NUM_LINEARS:
        layer = count // 6
        heads = [linear((latest,), 384, 384) for _ in range(3)]
        mixed = add(f"attention{layer}", "fixed", tuple(heads), 384)
        summed = add(f"add{layer}", "dependent", (linear((mixed,), 384, 384), latest), 384)
        norm = add(f"norm{layer}", "fixed", (summed,), 384)
        wide = add(f"gelu{layer}", "fixed", (linear((norm,), 384, 1536),), 1536)
        latest = add(f"output{layer}", "fixed", (linear((wide,), 1536, 384), norm), 384)
    while count < NUM_LINEARS:
        latest = linear((latest,), 384, 384)
    return Graph(ops)


def kernel_s(op, precision):
    """Seconds of both passes."""
    if op.kind != "linear":
        return LAUNCH_S + op.numel * BYTES[precision] / BYTES_PER_S
    return LAUNCH_S + 6 * TOKENS * op.weight_numel / FLOPS_PER_S * SPEEDS[precision]


def cast_s(source, target, numel):
    return LAUNCH_S + numel * (BYTES[source] + BYTES[target]) / BYTES_PER_S


def draw_noise(graph, seed=0):
    """Noise by operator: of int8 about a hundred times bf16's."""
    random = np.random.default_rng(seed)
    table = {}
    for i in graph.linears:
        bf16 = float(1e-6 * random.lognormal(0, 1.5))
        table[graph.ops[i].name] = {"bf16": bf16, "int8": bf16 * float(random.lognormal(4, 1))}
    return table


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("kind", ["chain", "transformer"])
def bench_noise(benchmark, record_claim, kind, share):
    """Seconds and noise of a plan of one rank for a share of float32's step."""
    graph = make_graph(kind)
    noise = draw_noise(graph)
    costs = RankCosts(kernel_s=kernel_s, backward_kernel_s=lambda *_: 0.0, cast_s=cast_s)
    operators = {graph.ops[i].name: "Linear" for i in graph.linears}

    def run():
        began = time.perf_counter()
        plan = allocate(
            graph,
            noise,
            [costs],
            precisions=PRECISIONS,
            operators=operators,
            target_time=f"{share}x",
        )
        return plan, time.perf_counter() - began

    plan, took_s = benchmark.pedantic(run, rounds=1)
    best = solve(
        graph, noise, precisions=PRECISIONS, kernel_s=kernel_s, cast_s=cast_s, limit_s=plan.target_s
    )
    where = f"{NUM_LINEARS} operators, 3 precisions, {kind}, {share:.0%} of the step"
    is_right = plan.is_target_met and best.precisions is not None
    lowered = list(plan.ranks[0].lowered.values())
    detail = (
        f"{lowered.count('int8')} in int8, {lowered.count('bf16')} in bf16; HiGHS's bound {best.bound:.4g}, "
        f"{'finished' if best.is_optimal else 'stopped after a minute'}"
    )
    for title, unit, ours, baseline, name, aim in (
        ("noise", "squared relative error", plan.noise, best.noise, "HiGHS", 1 / 1.05),
        ("seconds of planning", "s", took_s, 10.0, "the aim", 1.0),
    ):
        record_claim(
            Claim(
                name=f"{title}, {where}",
                unit=unit,
                ours=ours,
                baseline=baseline,
                baseline_name=name,
                higher_is_better=False,
                correct=is_right and bool(plan.noise >= best.bound * (1 - 1e-6)),
                detail=detail,
                source=f'{COMMAND} -k "noise and {kind} and {share}"',
            ),
            aim=aim,
        )


def bench_trial(benchmark, record_claim):
    """One operator changed: its neighbours priced anew and the step replayed, beside building all of it."""
    graph = make_graph("transformer")
    names = [graph.ops[i].name for i in graph.linears]
    random = np.random.default_rng(1)
    changes = [
        (names[int(random.integers(len(names)))], PRECISIONS[int(random.integers(3))])
        for _ in range(TRIALS)
    ]
    buckets = GradientBuckets(
        ops=[names[i : i + 50] for i in range(0, len(names), 50)][::-1], transfer_s=[0.05] * 10
    )
    mapper = CostMapper(graph, kernel_s=kernel_s, cast_s=cast_s)
    replay = StepReplay(graph, buckets, 2)
    other = RankSeconds(forward_s=mapper.forward_s.copy(), backward_s=mapper.backward_s.copy())
    other_ready = replay.ready_s(other)

    def change(name, precision):
        mapper.set(name, precision)
        own = RankSeconds(forward_s=mapper.forward_s, backward_s=mapper.backward_s)
        return replay.step_s([other_ready, replay.ready_s(own)])

    def build(chosen):
        anew = CostMapper(graph, kernel_s=kernel_s, cast_s=cast_s)
        for name, precision in chosen.items():
            anew.set(name, precision)
        own = RankSeconds(forward_s=anew.forward_s, backward_s=anew.backward_s)
        return StepReplay(graph, buckets, 2).run([other, own]).step_s

    def run():
        times, chosen, apart = {"change": [], "build": []}, {}, 0.0
        for i, (name, precision) in enumerate(changes):
            chosen[name] = precision
            began = time.perf_counter()
            changed_s = change(name, precision)
            times["change"].append(time.perf_counter() - began)
            if i % 10 == 0:
                began = time.perf_counter()
                built_s = build(chosen)
                times["build"].append(time.perf_counter() - began)
                apart = max(apart, abs(changed_s / built_s - 1))
        return times, apart

    times, apart = benchmark.pedantic(run, rounds=1)
    record_claim(
        Claim(
            name=f"a trial of one change among {NUM_LINEARS} operators",
            unit="s",
            ours=median(times["change"]),
            baseline=median(times["build"]),
            baseline_name="building it anew",
            higher_is_better=False,
            correct=bool(apart <= 1e-9),
            detail=f"{TRIALS} changes, {len(times['build'])} of them also built anew; both steps equal within {apart:.0e}",
            source=f"{COMMAND} -k trial",
        ),
        aim=5.0,
    )
