"""Compares what ranks should hold alike: seeds, merged rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from shared.comms import Group, all_gather
from shared.errors import CommError, DataError
from shared.kernels.digest import digest

__all__ = ["check_same", "sum_losses"]

_SEEDS = "seeds"


def check_same(group: Group, digests: Mapping[str, int], step: int) -> None:
    """Compares 64-bit digests over ranks, in one message.

    Args:
        group: the ranks.
        digests: by what they are of, "seeds" among them; the same names in one order on every rank.
        step: the training step, for errors.

    Raises:
        DataError: ranks were given different seeds.
        CommError: something else differs; names the step and the ranks.
    """
    by_rank = all_gather(group, torch.tensor([_to_signed(each) for each in digests.values()]))
    for i, what in enumerate(digests):
        _check_row(group.ranks, [int(each[i]) for each in by_rank], what, step)


def sum_losses(group: Group, loss: float, seeds: Tensor, num_replicas: int, step: int) -> float:
    """Sums the losses of all replicas, each of its share of one batch, which is compared on the way.

    Args:
        group: all ranks; those of one part come one after another.
        loss: this rank's; all parts of a replica have the same one.
        seeds: the whole batch.
        num_replicas: number of replicas.
        step: the training step, for errors.

    Raises:
        DataError: ranks were given different seeds.
    """
    bits = torch.tensor([loss], dtype=torch.float64).view(torch.int64)
    by_rank = all_gather(group, torch.cat([bits, torch.tensor([_to_signed(digest(seeds))])]))
    _check_row(group.ranks, [int(each[1]) for each in by_rank], _SEEDS, step)
    return sum(float(each[:1].view(torch.float64)) for each in by_rank[:num_replicas])


def _to_signed(number: int) -> int:
    """A digest as an int64 tensor holds it."""
    return number - (1 << 64) if number >= 1 << 63 else number


def _check_row(ranks: Sequence[int], digests: list[int], what: str, step: int) -> None:
    common = max(digests, key=digests.count)
    odd = [rank for rank, each in zip(ranks, digests, strict=True) if each != common]
    if not odd:
        return
    # Two ranks that differ do not tell which of them is wrong.
    names = odd if len(odd) < digests.count(common) else list(ranks)
    who = f"rank {names[0]}" if len(names) == 1 else f"ranks {names}"
    if what == _SEEDS:
        raise DataError(
            f"step {step}: expected the same seeds on every rank, those of {who} differ; pass the whole "
            f"batch on each, in an order that all share, as Trainer.batches gives it"
        )
    raise CommError(
        f"step {step}, {what}: expected the same merged rows on every rank, those of {who} differ; "
        f"memory or a link is faulty, or the ranks run different code: restart from the last checkpoint"
    )
