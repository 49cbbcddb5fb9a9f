"""Steps by each strategy in turns on the same ranks, beside what their plans predict.

All begin with the same values, see the same batches and draw the same edges. Turns spread other load
of the machine evenly; each ends when every rank has finished it.
"""

from __future__ import annotations

import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

import torch

from heta.config import TrainConfig
from heta.graph.hetero_graph import HeteroGraph
from heta.graph.part import load
from heta.partitioning.plan import STRATEGIES, Plan
from heta.partitioning.planner import plan
from heta.profiler import measure_rates
from heta.training.jobs.launch import MODULES
from heta.training.jobs.training_run import make_trainer
from heta.training.trainer import Trainer
from shared.comms import Group, NetLab, RankPool, all_gather, all_reduce, barrier
from shared.topology import Cluster, Link
from shared.topology.device import CPU
from shared.topology.link import fit_link
from shared.training.progress import show_progress

__all__ = [
    "StrategyComparison",
    "Timing",
    "compare_in_rank",
    "compare_strategies",
    "measure_network",
]

# Sizes of all-reduces, in bytes; one is about a merge's.
_SIZES = (1 << 14, 1 << 18, 1 << 20)
_REPEATS = 5
_EMPTY_REPEATS, _WORK = 51, 512
_LIMIT = timedelta(hours=2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Steps of one plan.

    Attributes:
        losses: of every step, those before the timed turns included.
        step_s: seconds of a step of the slowest rank, one value a turn.
        sent_bytes: bytes that all ranks sent in a step, the mean over the timed turns.
        auc: area under the ROC curve on the split "val", after all steps; None unless there are two
            classes.
    """

    losses: list[float]
    step_s: list[float]
    sent_bytes: float
    auc: float | None

    @property
    def median_s(self) -> float:
        """Median seconds of a step."""
        return median(self.step_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyComparison:
    """What was predicted and measured.

    Attributes:
        plans: each strategy's, predicted for the measured link and rates.
        timings: each strategy's, one rank a host.
        alone: the timing of one process.
        link: between two ranks.
    """

    plans: dict[str, Plan]
    timings: dict[str, Timing]
    alone: Timing
    link: Link


def compare_strategies(
    graph: HeteroGraph,
    config: TrainConfig,
    hosts: int,
    settings: dict[str, Any],
    *,
    turns: int,
    steps_per_turn: int,
    rate: str | None = None,
) -> StrategyComparison:
    """Trains by each strategy with a rank for each host on this machine, and in one process.

    Args:
        graph: the graph.
        config: of the training.
        hosts: number of hosts, 2 or more.
        settings: arguments of `plan` other than these.
        turns, steps_per_turn: as of `compare_in_rank`.
        rate: of emulated links between the hosts, as "100mbit", which needs root; None: this
            machine's loopback.

    Raises:
        NetLabUnavailable: this machine cannot emulate links.
        ConfigError: an argument is invalid.
    """
    counts = (turns, steps_per_turn)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        alone = _write(graph, plan(graph, parts=1, **settings), folder, "alone")
        with show_progress("training in one process"), RankPool(1, modules=MODULES) as pool:
            timing = pool.run(compare_in_rank, [alone], config, *counts, timeout=_LIMIT).results[0]
            rates = pool.run(measure_rates).results[0]
        if rate is None:
            pool = RankPool(hosts, modules=MODULES)
        else:
            pool = stack.enter_context(NetLab(hosts=hosts, rate=rate)).pool(modules=MODULES)
        pool = stack.enter_context(pool)
        link, exchange_s = pool.run(measure_network).results[0]
        rates = replace(rates, exchange_s=exchange_s)
        cluster = Cluster.uniform(hosts, 1, CPU, network=link)
        with show_progress("writing parts for each strategy"):
            plans = {
                name: plan(
                    graph, parts=hosts, strategy=name, cluster=cluster, rates=rates, **settings
                )
                for name in STRATEGIES
            }
            folders = [_write(graph, each, folder, name) for name, each in plans.items()]
        with show_progress(f"training on {hosts} ranks by each strategy in turns"):
            timings = pool.run(compare_in_rank, folders, config, *counts, timeout=_LIMIT).results[0]
    return StrategyComparison(
        plans=plans,
        timings=dict(zip(STRATEGIES, timings, strict=True)),
        alone=timing[0],
        link=link,
    )


def _write(graph: HeteroGraph, chosen: Plan, *folder: Path | str) -> str:
    path = Path(*folder)
    chosen.write(graph, path)
    return str(path)


def compare_in_rank(
    folders: list[str], config: TrainConfig, turns: int, steps_per_turn: int
) -> list[Timing]:
    """Trains over the parts of each folder in turns; every rank calls it.

    Args:
        folders: parts of several plans for one graph.
        config: settings; all plans begin alike and see the same batches.
        turns: timed turns of each plan; one more goes before them.
        steps_per_turn: steps in a turn.

    """
    trainers = [make_trainer(load(folder), config) for folder in folders]
    group = trainers[0].group
    losses: list[list[float]] = [[] for _ in trainers]
    step_s: list[list[float]] = [[] for _ in trainers]
    sent = [0] * len(trainers)
    batches = trainers[0].batches()
    batches = batches[:-1] or batches  # the last may be a short one
    for turn in range(turns + 1):
        first = turn * steps_per_turn
        chosen = [batches[i % len(batches)] for i in range(first, first + steps_per_turn)]
        for number, trainer in enumerate(trainers):
            before = 0 if group is None else group.ledger.sent_bytes
            seconds = _time_turn(trainer, chosen, losses[number])
            if turn:
                step_s[number].append(seconds / len(chosen))
                sent[number] += 0 if group is None else group.ledger.sent_bytes - before
    timings = []
    for number, trainer in enumerate(trainers):
        has_scores = "val" in trainer.part.masks and len(trainer.part.seeds("val"))
        timings.append(
            Timing(
                losses=losses[number],
                step_s=step_s[number],
                sent_bytes=_sum_over(group, sent[number]) / (turns * steps_per_turn),
                auc=trainer.evaluate("val").auc if has_scores else None,
            )
        )
        trainer.close()
    return timings


def _time_turn(trainer: Trainer, batches: list[torch.Tensor], losses: list[float]) -> float:
    """Seconds of the slowest rank."""
    if trainer.group is not None:
        barrier(trainer.group)
    began = time.perf_counter()
    losses.extend(trainer.steps(batches))
    seconds = torch.tensor([time.perf_counter() - began])
    if trainer.group is None:
        return float(seconds)
    return float(torch.cat(all_gather(trainer.group, seconds)).max())


def _sum_over(group: Group | None, count: int) -> float:
    if group is None:
        return float(count)
    return float(all_reduce(group, torch.tensor([float(count)], dtype=torch.float64)))


def measure_network() -> tuple[Link, float]:
    """Measures the ranks' network; every rank calls it.

    Returns:
        The link between two ranks, fitted to all-reduces of several sizes; and the median seconds of a
        collective that carries next to nothing, as ranks meet between pieces of work.
    """
    group, samples, empty_s = Group.world(), [], []
    for _ in range(_EMPTY_REPEATS):
        torch.ones(_WORK, _WORK) @ torch.ones(_WORK, _WORK)
        began = time.perf_counter()
        all_gather(group, torch.zeros(1))
        empty_s.append(time.perf_counter() - began)
    for num_bytes in _SIZES:
        data = torch.zeros(num_bytes // 4)
        for _ in range(_REPEATS):
            barrier(group)
            began = time.perf_counter()
            all_reduce(group, data)
            # A ring sends 2 (n - 1) messages of an n-th one after another.
            messages = 2 * (group.world_size - 1)
            seconds = (time.perf_counter() - began) / messages
            samples.append((num_bytes / group.world_size, seconds))
    return fit_link(samples, is_quiet=True).link, median(empty_s)
