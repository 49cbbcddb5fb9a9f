"""The replay beside measurement: sleeping computation on 4 and 8 hosts, and real computation on two.

Sleeping: a captured backward graph whose operators sleep for their measured seconds; those below half a
millisecond and sums over ranks take none. All-to-alls are real, each rank on a host at 100 Mbit/s. Real: a
Qwen3-MoE of two layers with experts of three widths, the backward pass, two hosts, a core each.
Predicted is what the package plans with: a replay of operators timed alone in the first step. Orders are the
captured one, starts hoisted and waits sunk, Inductor's (real computation) and ours, in turns.
"""

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from itertools import islice
from pathlib import Path
from statistics import median, quantiles
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import lancet
from lancet.graph.operations import LaunchOrder, Op
from lancet.simulator import simulate
from shared.claims import Claim
from shared.comms import Group, NetLab, RankPool, barrier, netlab
from shared.comms.handicap import handicap

sys.path.insert(0, str(Path(__file__).parent))

from moe_jobs import (
    HOISTED,
    INDUCTOR,
    Job,
    Step,
    add_rivals,
    build,
    list_orders,
    share_ops,
)
from rival_orders import hoist_starts
from sleeping_graphs import SleepingGraph, drop_short

pytestmark = [
    pytest.mark.netns,
    pytest.mark.skipif(netlab.available() is not None, reason=str(netlab.available())),
]

RATE, TURNS = "100mbit", 9
SHORTEST_S = 0.5e-3
RATIO = 0.5
"""All-to-alls over computing of the sleeping graphs."""
SIZES, WIDTHS = Job(num_layers=2), (256, 512, 1024)
SLEEPING_AIM, REAL_AIM = 5.0, 10.0
"""Largest error with sleeping computation, median error with real one, in percent."""
CAPTURED, OURS = "captured", "planned"
REVISION = 2
COMMAND = "hatch run bench lancet/replay"


class Case(NamedTuple):
    """An order: predicted seconds, and measured ones by turn."""

    name: str
    predicted_s: float
    seconds: list[float]

    @property
    def error(self) -> float:
        """Of the prediction, in percent of the median."""
        return 100 * (self.predicted_s / median(self.seconds) - 1)

    @property
    def spread(self) -> float:
        """Half the distance of the quartiles, in percent of the median."""
        low, _, high = quantiles(self.seconds, n=4)
        return 50 * (high - low) / median(self.seconds)

    def describe(self) -> str:
        return (
            f"{self.name}: predicted {self.predicted_s:.3f} s, measured {median(self.seconds):.3f} "
            f"({min(self.seconds):.3f} to {max(self.seconds):.3f}), error {self.error:+.1f} %, "
            f"repeats within {self.spread:.1f} %"
        )


def capture_backward() -> list[Op]:
    """The backward graph of a step, with seconds of both ranks."""
    torch.set_num_threads(1)
    group = Group.world()
    model = lancet.parallelize(build(SIZES), group)
    backend = lancet.Backend(group, partition=None)
    batch = next(SIZES.batches(group.rank))
    torch.compile(model, backend=backend, fullgraph=True)(**batch).loss.backward()
    (executor,) = (e for e in backend.executors if e.captured.direction == "backward")
    return share_ops(executor)


def run_sleeping(ops: Sequence[Op], num_bytes: int, num_turns: int) -> tuple[dict, dict]:
    """Predicted seconds of each order, and this rank's measured ones."""
    group = Group.world()
    graph, other = (SleepingGraph(ops, num_bytes, group) for _ in range(2))
    # Connections are slow at first: as the package does, of two runs the least seconds count.
    other.run(CAPTURED)
    graph.run(CAPTURED)
    earlier_s = {op.name: op.time_s for op in share_ops(other.executor)}
    timed = [
        replace(op, time_s=min(op.time_s, earlier_s[op.name])) for op in share_ops(graph.executor)
    ]
    orders = {
        CAPTURED: [op.name for op in timed],
        HOISTED: hoist_starts(timed),
        OURS: list(lancet.schedule(timed).order),
    }
    by_name = {op.name: op for op in timed}
    predicted, seconds = {}, {name: [] for name in orders}
    for name, order in orders.items():
        predicted[name] = simulate(by_name[op] for op in order).makespan_s
        graph.executor.add_order(name, LaunchOrder(tuple(order)))
    for _ in range(num_turns):
        for name in orders:
            barrier(group)
            seconds[name].append(graph.run(name))
    return predicted, seconds


@pytest.mark.parametrize("num_ranks", [4, 8])
def bench_sleeping(benchmark, record_claim, num_ranks):
    with RankPool(2, timeout=timedelta(minutes=5)) as pool:
        captured = pool.run(capture_backward).results[0]
    ops = drop_short(captured, SHORTEST_S)
    compute_s = sum(op.time_s for op in ops if op.kind == "compute")
    num_exchanges = sum(op.kind == "all_to_all" for op in ops)
    with NetLab(hosts=num_ranks, rate=RATE) as lab, lab.pool(timeout=timedelta(minutes=5)) as pool:
        share_s = RATIO * compute_s / num_exchanges
        num_bytes = int(share_s * lab.bytes_per_s / (num_ranks - 1))
        ranks = benchmark.pedantic(
            lambda: pool.run(run_sleeping, ops, num_bytes, TURNS).results, rounds=1
        )
    predicted = ranks[0][0]
    cases = [
        Case(
            name,
            predicted[name],
            [max(own) for own in zip(*(s[name] for _, s in ranks), strict=True)],
        )
        for name in predicted
    ]
    # A graph that neither slept nor sent would be over at once.
    is_right = all(min(case.seconds) > 0.95 * compute_s for case in cases)
    is_right = is_right and predicted[OURS] < predicted[CAPTURED]
    record_error(
        record_claim, cases, max, "largest", f"sleeping computation, {num_ranks} ranks", SLEEPING_AIM, is_right,
        f"computing {compute_s:.3f} s, {num_exchanges} all-to-alls of {num_bytes:,} bytes to each rank",
        f'{COMMAND} -k "sleeping and {num_ranks}"',
    )  # fmt: skip


def run_real(num_turns: int) -> list[tuple[int, dict, dict]]:
    """By width, predicted seconds of each order and this rank's measured ones."""
    torch.set_num_threads(1)
    group = Group.world()
    results = []
    for width in WIDTHS:
        torch._dynamo.reset()
        job = Job(num_layers=SIZES.num_layers, expert_width=width)
        model = lancet.parallelize(build(job), group)
        optimizer = torch.optim.SGD(model.parameters(), 0.0)
        backend = lancet.Backend(group, partition=None)
        step = torch.compile(model, backend=backend, fullgraph=True)
        ways = {
            name: Step(step, model, optimizer, backend, name)
            for name in (CAPTURED, HOISTED, INDUCTOR, OURS)
        }
        batches = job.batches(group.rank)
        ways[OURS].differentiate(next(batches))
        add_rivals(backend)
        (executor,) = (e for e in backend.executors if e.captured.direction == "backward")
        ops = {op.name: op for op in share_ops(executor)}
        predicted = {
            name: simulate(ops[op] for op in order).makespan_s
            for name, order in list_orders(backend, executor).items()
        }
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        for batch in islice(batches, num_turns):
            for name, way in ways.items():
                seconds[name].append(time_backward(way, batch))
        results.append((width, predicted, seconds))
    return results


def time_backward(way: Step, batch: Mapping[str, Tensor]) -> float:
    """Seconds of a backward pass, a barrier before it."""
    assert way.backend is not None
    way.backend.use_order(way.order)
    way.model.zero_grad()
    loss = way.run(**batch).loss
    barrier(Group.world())
    began = time.perf_counter()
    loss.backward()
    return time.perf_counter() - began


def bench_real(benchmark, record_claim):
    words = [handicap(cores=[0]), handicap(cores=[1])]
    with (
        NetLab(hosts=2, rate=RATE) as lab,
        lab.pool(handicaps=words, timeout=timedelta(minutes=9)) as pool,
    ):
        ranks = benchmark.pedantic(lambda: pool.run(run_real, TURNS).results, rounds=1)
    cases = []
    for by_rank in zip(*ranks, strict=True):
        width, predicted, _ = by_rank[0]
        for name in predicted:
            turns = zip(*(seconds[name] for _, _, seconds in by_rank), strict=True)
            cases.append(
                Case(f"width {width}, {name}", predicted[name], [max(own) for own in turns])
            )
    widest = [median(case.seconds) for case in cases if CAPTURED in case.name]
    is_right = widest == sorted(widest) and widest[-1] > 1.1 * widest[0]
    record_error(
        record_claim, cases, median, "median", "real computation, 2 ranks", REAL_AIM, is_right,
        f"{SIZES.num_layers} layers of {SIZES.hidden_size}", f"{COMMAND} -k real",
    )  # fmt: skip


def record_error(
    record_claim: Any, cases: Sequence[Case], summarize: Any, word: str, where: str, aim: float,
    is_right: bool, what: str, source: str,
) -> None:  # fmt: skip
    error = summarize([abs(case.error) for case in cases])
    record_claim(
        Claim(
            name=f"{word} error of a replayed backward pass, {where}", unit="%", ours=error, baseline=aim,
            baseline_name="the aim", higher_is_better=False, correct=is_right,
            ratio=aim / max(error, 0.01),
            detail=f"{what}; {TURNS} turns; repeats' spread {max(case.spread for case in cases):.1f} % at most; "
            + "; ".join(case.describe() for case in cases),
            source=source,
        ),
        aim=1.0,
    )  # fmt: skip
