"""What all ranks hold after a failure, gathered, so that each of them decides alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shared.comms import Group, all_gather, all_gather_v
from shared.errors import DataError
from shared.kernels.digest import digest
from swift.recovery.planner import decide
from swift.training.checkpoints import Every
from swift.training.trainable import Trainable

__all__ = [
    "HeldStates",
    "Sizes",
    "are_logged",
    "begin_equal",
    "expect_equal",
    "expect_equal_parameters",
    "gather_sizes",
    "gather_texts",
]

Sets = Sequence[Sequence[int]]
"""Ranks of each replica set."""


@dataclass(frozen=True, slots=True)
class HeldStates:
    """What all ranks hold.

    Attributes:
        versions: by rank, of each entry; None of a rank that holds nothing.
        checkpoint: step of the newest one that every rank sees; 0: there is none.
    """

    versions: dict[int, list[int] | None]
    checkpoint: int

    @staticmethod
    def gather(
        group: Group, trainable: Trainable, checkpoint: Every | None, *, is_filled: bool
    ) -> HeldStates:
        """Gathers them.

        Args:
            group: all ranks, which call this together.
            trainable: this rank's.
            checkpoint: this rank's.
            is_filled: whether this rank holds a state.

        Raises:
            CommError: a rank was lost.
        """
        latest = 0 if checkpoint is None else checkpoint.latest()
        rows = _gather_rows(group, [int(is_filled), latest, *trainable.versions()])
        return HeldStates(
            {rank: versions if held else None for rank, (held, _, *versions) in enumerate(rows)},
            min(row[1] for row in rows),
        )

    @property
    def is_untrained(self) -> bool:
        """Whether all that is held is as it was built: no step was made, and no checkpoint read."""
        held = [row for row in self.versions.values() if row is not None]
        return bool(held) and not any(map(any, held))

    def of(self, sets: Sets) -> list[dict[int, list[int] | None]]:
        """The versions by replica set, as `decide` takes them."""
        return [{rank: self.versions[rank] for rank in ranks} for ranks in sets]


@dataclass(frozen=True, slots=True)
class Sizes:
    """What a transfer has to know of all ranks, by rank.

    Attributes:
        num_tensors: of each entry.
        rest_bytes: of the last entry.
        could_undo: whether the rank has undone what it was to.
    """

    num_tensors: dict[int, list[int]]
    rest_bytes: list[int]
    could_undo: list[bool]


def gather_sizes(group: Group, trainable: Trainable, *, could_undo: bool) -> Sizes:
    """Gathers sizes; behind the undoing, which takes away what a first step has made.

    Raises:
        CommError: a rank was lost.
    """
    states = [trainable.state_of(entry) for entry in range(len(trainable.versions()))]
    mine = [int(could_undo), states[-1]["rest"].numel(), *map(len, states)]
    rows = _gather_rows(group, mine)
    return Sizes(
        {rank: row[2:] for rank, row in enumerate(rows)},
        [row[1] for row in rows],
        [bool(row[0]) for row in rows],
    )


def begin_equal(group: Group, trainable: Trainable, held: HeldStates, sets: Sets) -> None:
    """Has ranks that were built unlike the first of their set be filled from it.

    They keep what they were built with until then: should the first one die, they are filled from
    the next.

    Args:
        group: all ranks, which call this together.
        trainable: this rank's.
        held: as built; without versions afterwards where a rank is to be filled.
        sets: ranks of each replica set.

    Raises:
        CommError: a rank was lost.
    """
    found = all_gather(group, _digest(group, trainable))
    for ranks in sets:
        built = [rank for rank in ranks if held.versions[rank] is not None]
        for rank in built:
            if not torch.equal(found[rank], found[built[0]]):
                held.versions[rank] = None


def are_logged(
    group: Group, trainable: Trainable, held: HeldStates, sets: Sets
) -> tuple[bool, str]:
    """Whether the survivors' logs hold all messages of the sets that are lost whole.

    Returns:
        Whether they do, and why if they do not; empty where no set, or each, is lost whole.

    Raises:
        CommError: a rank was lost.
    """
    versions = held.of(sets)
    lost = [all(row is None for row in each.values()) for each in versions]
    if not any(lost) or all(lost):
        return False, ""
    # Where one survivor is a step behind, the others undo theirs, and logs need not reach it.
    alive = [each for each, is_lost in zip(versions, lost, strict=True) if not is_lost]
    reached = decide(alive).target
    gap = "survivors are more than a step apart"
    if reached is not None:
        gap = trainable.find_log_gap(reached, held.checkpoint) or ""
    texts = gather_texts(group, gap)
    found = [texts[rank] for rank, row in held.versions.items() if row is not None]
    gap = next(filter(None, found), "")
    return not gap, gap


def expect_equal(group: Group, trainable: Trainable, sets: Sets, step: int) -> None:
    """Compares digests of all ranks' states.

    Args:
        group: all ranks, which call this together.
        trainable: this rank's.
        sets: ranks of each replica set, which hold the same.
        step: at which all are.

    Raises:
        DataError: ranks of a set differ.
        CommError: a rank was lost.
    """
    found = all_gather(group, _digest(group, trainable))
    for ranks in sets:
        odd = [rank for rank in ranks if not torch.equal(found[rank], found[ranks[0]])]
        if odd:
            raise DataError(
                f"after the recovery to step {step}, ranks {odd} differ from rank {ranks[0]}, "
                f"whose state they replicate; a parameter was changed outside the optimizer, or "
                f"memory is faulty: go back to a checkpoint"
            )


def expect_equal_parameters(group: Group, parameters: Mapping[str, Tensor], step: int) -> None:
    """Compares digests of all ranks' parameters after a step.

    Args:
        group: ranks that hold the same, which call this together.
        parameters: this rank's by name, the same names on all ranks.
        step: that is done.

    Raises:
        DataError: ranks differ.
        CommError: a rank was lost.
    """
    if group.world_size == 1:
        return
    tensors = list(parameters.values())
    rows = all_gather(group, _halves([digest(tensors)], group.device))
    if all(torch.equal(row, rows[0]) for row in rows):
        return
    # Which one: their own digests, which a step without differences does without.
    rows = all_gather(group, _halves([digest(one) for one in tensors], group.device))
    index = min(int((row != rows[0]).any(1).nonzero()[0]) for row in rows if not row.equal(rows[0]))
    odd = [
        rank
        for rank, row in zip(group.ranks, rows, strict=True)
        if not row[index].equal(rows[0][index])
    ]
    raise DataError(
        f"step {step}: expected equal parameters on all ranks, got another {list(parameters)[index]} on "
        f"ranks {odd} than on rank {group.ranks[0]}; it was changed by something that is not the same "
        f"on all ranks: step it by swift.undoable's optimizer alone, change it by averaged gradients, "
        f"and give what else changes it to swift.DataParallel(..., stateful=[...])"
    )


def gather_texts(group: Group, text: str) -> list[str]:
    """Every rank's text.

    Raises:
        CommError: a rank was lost.
    """
    mine = torch.tensor(list(text.encode()), dtype=torch.uint8, device=group.device)
    return [bytes(each.tolist()).decode() for each in all_gather_v(group, mine)]


def _gather_rows(group: Group, mine: list[int]) -> list[list[int]]:
    """Every rank's numbers, which may differ in count."""
    length = torch.tensor([len(mine)], device=group.device)
    lengths = [int(one) for one in all_gather(group, length)]
    padded = torch.zeros(max(lengths), dtype=torch.int64, device=group.device)
    padded[: len(mine)] = torch.tensor(mine, device=group.device)
    rows = all_gather(group, padded)
    return [row[:length].tolist() for row, length in zip(rows, lengths, strict=True)]


def _digest(group: Group, trainable: Trainable) -> torch.Tensor:
    tensors = [
        tensor
        for entry in range(len(trainable.versions()))
        for tensor in trainable.state_of(entry).values()
    ]
    return _halves([digest(tensors)], group.device)[0]


def _halves(digests: Sequence[int], device: torch.device) -> Tensor:
    """Two halves of each, as 64 unsigned bits are no torch integer."""
    rows = [[value >> 32, value & 0xFFFFFFFF] for value in digests]
    return torch.tensor(rows, device=device)
