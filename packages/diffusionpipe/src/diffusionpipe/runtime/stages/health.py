"""Finds values that are not finite, and which stage and samples they come from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["BadValues", "Health"]


class BadValues(NamedTuple):
    """Values that are not finite.

    Attributes:
        what: "forward", "loss", "backward" or "gradients".
        stage: virtual stage that computed them.
        samples: rows of the batch; empty where they are unknown.
    """

    what: str
    stage: int
    samples: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Note:
    what: str
    stage: int
    samples: tuple[int, int]
    sums: Tensor


class Health:
    """Notes of one rank in one step; reading them waits for a GPU, taking them does not."""

    def __init__(self) -> None:
        self._notes: list[_Note] = []

    def note(self, stage: int, what: str, samples: tuple[int, int], value: Tensor) -> None:
        """Notes a value's sums by row; a row with NaN or infinity has such a sum.

        Args:
            stage: that computed it.
            what: "forward", "loss" or "backward".
            samples: its rows of the batch.
            value: a row a sample, or of another shape: then all samples are suspected.
        """
        value = value.detach()
        if not value.is_floating_point():
            return
        num_rows = samples[1] - samples[0]
        has_rows = value.dim() > 0 and len(value) == num_rows
        rows = value.reshape(num_rows if has_rows else 1, -1)
        sums = rows.sum(1, dtype=torch.promote_types(value.dtype, torch.float32))
        self._notes.append(_Note(what, stage, samples, sums))

    def find_problems(self) -> list[BadValues]:
        """What was noted and is not finite, first noted first."""
        problems = []
        for note in self._notes:
            is_bad = ~note.sums.isfinite()
            if is_bad.any():
                first, stop = note.samples
                rows = range(first, stop)
                if len(is_bad) == len(rows):
                    rows = [row for row, bad in zip(rows, is_bad.tolist(), strict=True) if bad]
                problems.append(BadValues(note.what, note.stage, tuple(rows)))
        return problems
