"""Compares the epoch times of policies on the same ranks, in alternating blocks of epochs.

Alternating spreads other load of the machine evenly over all policies. Each block ends when all its
messages have arrived, so that none delays the next policy's block.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import median

import torch

from adaqp.messages.distgraph import DistGraph, load
from adaqp.messages.runtime import Messages
from adaqp.policy import Adaptive
from adaqp.training.config import ModelConfig, PolicyConfig
from adaqp.training.trainer import Trainer
from shared.comms import all_reduce, barrier

__all__ = ["Timing", "compare", "compare_in_rank"]

# The adaptive policy assigns widths in the last of them, from the ranges of the first ones.
_WARM_EPOCHS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """One policy's epochs, as the slowest rank saw them.

    Attributes:
        epoch_s: seconds per epoch, one value per block.
        seconds: median seconds of an epoch by phase, on rank 0.
        num_bytes: bytes that all ranks together sent in an epoch.
        bits: share of rank 0's rows at each width, by channel.
        assign_s: seconds of one assignment after the timed epochs, with known link costs; 0 for
            policies without assignments.
        loss: mean loss over all training nodes, one value per epoch.
        accuracy: accuracy by split after the last epoch, with exact messages; None of a split
            without nodes.
    """

    policy: PolicyConfig
    epoch_s: list[float]
    seconds: dict[str, float]
    num_bytes: int
    bits: dict[str, dict[int, float]]
    assign_s: float
    loss: list[float]
    accuracy: dict[str, float | None]

    @property
    def median_s(self) -> float:
        """Median seconds of an epoch."""
        return median(self.epoch_s)


@dataclass(slots=True)
class _Run:
    trainer: Trainer
    messages: Messages
    epoch_s: list[float]
    epoch_bytes: list[float]


def compare(
    dg: DistGraph,
    model: ModelConfig,
    policies: list[PolicyConfig],
    *,
    blocks: int,
    epochs_per_block: int = 3,
    lr: float = 1e-2,
) -> list[Timing]:
    """Times epochs of each policy; all ranks call it together.

    Args:
        dg: this rank's share.
        model: layers of the model; every policy starts from the same weights.
        policies: policies to compare; all train for the same number of epochs.
        blocks: number of timed blocks of each policy.
        epochs_per_block: epochs in a block.
        lr: Adam's learning rate.
    """
    runs = []
    for policy in policies:
        torch.manual_seed(0)
        layers = model.build(dg)
        built, settings = replace(policy, first_at=_WARM_EPOCHS - 1).build()
        messages = Messages(dg, built, **settings)
        with dg.using(messages):
            trainer = Trainer(dg, layers, torch.optim.Adam(layers.parameters(), lr))
            trainer.fit(_WARM_EPOCHS)
            messages.settle()
        runs.append(_Run(trainer, messages, [], []))
    for _ in range(blocks):
        for run in runs:
            _run_block(dg, run, epochs_per_block)
    return [
        _timing(dg, p, r, blocks * epochs_per_block) for p, r in zip(policies, runs, strict=True)
    ]


def compare_in_rank(
    folder: str,
    model: ModelConfig,
    policies: list[PolicyConfig],
    blocks: int,
    epochs_per_block: int = 3,
) -> list[Timing]:
    """`compare` on a partition on disk, as a function that a `RankPool` can run."""
    return compare(load(folder), model, policies, blocks=blocks, epochs_per_block=epochs_per_block)


def _run_block(dg: DistGraph, run: _Run, epochs: int) -> None:
    with dg.using(run.messages):

        def block() -> None:
            run.trainer.fit(epochs)
            run.messages.settle()

        # From the ledger after `settle`: a stale message may be sent after its epoch has ended.
        before = run.trainer.sent_bytes()
        run.epoch_s.append(_seconds(dg, block) / epochs)
        run.epoch_bytes.append((run.trainer.sent_bytes() - before) / epochs)


def _seconds(dg: DistGraph, act: Callable[[], None]) -> float:
    """Seconds that `act` takes on the slowest rank; all ranks start together."""
    if dg.group is not None:
        barrier(dg.group)
    start = time.perf_counter()
    act()
    spent_s = time.perf_counter() - start
    if dg.group is None:
        return spent_s
    spent = torch.tensor([spent_s], dtype=torch.float64, device=dg.group.device)
    all_reduce(dg.group, spent, "max")
    return float(spent)


def _timing(dg: DistGraph, policy: PolicyConfig, run: _Run, num_timed: int) -> Timing:
    history = run.trainer.history
    adapts = isinstance(run.messages.policy, Adaptive) and dg.group is not None
    with dg.using(run.messages):
        accuracy = run.trainer.evaluate()
    sent = torch.tensor([median(run.epoch_bytes)], dtype=torch.float64)
    if dg.group is not None:
        sent = sent.to(dg.group.device)
        all_reduce(dg.group, sent)
    return Timing(
        policy=policy,
        epoch_s=run.epoch_s,
        seconds={p: median(s[-num_timed:]) for p, s in history.seconds.items()},
        num_bytes=int(sent),
        bits=run.messages.report(),
        assign_s=_seconds(dg, run.messages.assign) if adapts else 0.0,
        loss=history.loss,
        accuracy=accuracy,
    )
