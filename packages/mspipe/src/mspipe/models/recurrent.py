"""A recurrent memory, the common base of TGN and JODIE."""

from __future__ import annotations

import torch
from torch import nn

from mspipe.memory.row_layout import State
from mspipe.models.base import MemoryModel, TimeEncoding, Updated, newest_mail
from shared.errors import ConfigError

__all__ = ["RecurrentModel"]


class RecurrentModel(MemoryModel):
    """s <- cell([mail | Phi(time of the mail - time of the memory)], s), once per node.

    The time span ends at the mail, not at the query, as in TGN's paper: it has one value per node,
    so that the cell runs once per distinct node instead of once per occurrence.
    """

    def __init__(self, dim: int, edge_dim: int, time_dim: int, cell: type[nn.Module]) -> None:
        super().__init__(dim, edge_dim)
        if time_dim < 1:
            raise ConfigError(f"expected time_dim of at least 1, got {time_dim}")
        self.time = TimeEncoding(time_dim)
        self.cell = cell(self.mail_dim + time_dim, dim)

    def update(self, state: State) -> Updated:
        """Runs the cell on rows that have mail."""
        has_mail, times = newest_mail(state)
        rows = has_mail.nonzero()[:, 0]
        old, mail = state.memory.index_select(0, rows), state.mail.index_select(0, rows)
        spans = times[rows] - state.memory_times[rows]
        new = self.cell(torch.cat([mail, self.time(spans)], 1), old)
        memory = state.memory.index_copy(0, rows, new)
        return Updated(memory, torch.where(has_mail, times, state.memory_times))
