"""Compares what ranks should hold alike: seeds, merged rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from shared.comms import Group, all_gather
from shared.errors import CommError, DataError
from shared.kernels.digest import digest

__all__ = ["check_same", "check_seeds", "sum_losses"]


def check_seeds(group: Group, seeds: Tensor, step: int) -> None:
    """Compares a batch's seeds over ranks, in one message.

    Args:
        group: the ranks.
        seeds: the whole batch.
        step: the training step, for errors.

    Raises:
        DataError: ranks were given different seeds.
    """
    who = _find_odd(group.ranks, [int(each) for each in _gather_digests(group, [digest(seeds)])])
    if who:
        raise DataError(
            f"step {step}: expected the same seeds on every rank, those of {who} differ; pass the whole "
            f"batch on each, in an order that all share, as Trainer.batches gives it"
        )


def check_same(group: Group, digests: Mapping[str, int], step: int) -> None:
    """Compares 64-bit digests of merged rows over ranks, in one message.

    Args:
        group: the ranks.
        digests: by what they are of; the same names in one order on every rank.
        step: the training step, for errors.

    Raises:
        CommError: something differs; names the step and the ranks.
    """
    by_rank = _gather_digests(group, digests.values())
    for i, what in enumerate(digests):
        who = _find_odd(group.ranks, [int(each[i]) for each in by_rank])
        if who:
            raise CommError(
                f"step {step}, {what}: expected the same merged rows on every rank, those of {who} "
                f"differ; memory or a link is faulty, or the ranks run different code: restart from the "
                f"last checkpoint"
            )


def sum_losses(group: Group, loss: float, num_replicas: int) -> float:
    """Sums the losses of all replicas, each of its share of one batch.

    Args:
        group: all ranks; those of one part come one after another.
        loss: this rank's; all parts of a replica have the same one.
        num_replicas: number of replicas.
    """
    by_rank = all_gather(group, torch.tensor([loss], dtype=torch.float64))
    return sum(map(float, by_rank[:num_replicas]))


def _gather_digests(group: Group, digests: Iterable[int]) -> list[Tensor]:
    """What each rank says, by rank."""
    return all_gather(group, torch.tensor([_to_signed(each) for each in digests]))


def _to_signed(number: int) -> int:
    """A digest as an int64 tensor holds it."""
    return number - (1 << 64) if number >= 1 << 63 else number


def _find_odd(ranks: Sequence[int], digests: list[int]) -> str:
    """The ranks whose digest is another one than most; nothing if all are the same."""
    common = max(digests, key=digests.count)
    odd = [rank for rank, each in zip(ranks, digests, strict=True) if each != common]
    if not odd:
        return ""
    # Two ranks that differ do not tell which of them is wrong.
    names = odd if len(odd) < digests.count(common) else list(ranks)
    return f"rank {names[0]}" if len(names) == 1 else f"ranks {names}"
