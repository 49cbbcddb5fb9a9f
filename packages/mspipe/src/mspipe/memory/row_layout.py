"""Layout of a node's row: its times, its state and its messages, as consecutive 32-bit words.

Times come first, as the bits of float64, then the state, then the messages. A batch reads and
writes whole rows, so that a row is sent over a link without repacking.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from shared.errors import ConfigError

__all__ = ["NEVER", "NO_MAIL", "RowLayout", "State"]

NO_MAIL = -1.0
"""The time of an empty message slot."""

NEVER = -1.0
"""The time of a state that was never written, in rows made before the stream's start is known."""


class State(NamedTuple):
    """The parts of some nodes' rows.

    Attributes:
        memory: float32 [n, dim], states.
        memory_times: float64 [n], time of the last event that the state includes.
        mail: float32 [n, mail_dim], or [n, slots, mail_dim] for several slots.
        mail_times: float64 [n] or [n, slots]; `NO_MAIL` for an empty slot.
    """

    memory: Float[Tensor, "n dim"]
    memory_times: Float64[Tensor, " n"]
    mail: Float[Tensor, "n *slots mail_dim"]
    mail_times: Float64[Tensor, " n *slots"]


@dataclass(frozen=True, slots=True)
class RowLayout:
    """Sizes and positions of the parts of a row.

    Attributes:
        dim: width of a state.
        mail_dim: width of a message.
        slots: number of messages.
    """

    dim: int
    mail_dim: int
    slots: int = 1

    def __post_init__(self) -> None:
        if self.dim < 1 or self.mail_dim < 0 or self.slots < 1:
            raise ConfigError(
                f"expected dim and slots of at least 1 and mail_dim of at least 0, got {self.dim}, "
                f"{self.slots}, {self.mail_dim}"
            )

    @property
    def num_words(self) -> int:
        """32-bit words of a row; even, so that times can be viewed as 64-bit numbers."""
        used = 2 * (1 + self.slots) + self.dim + self.slots * self.mail_dim
        return used + used % 2

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return 4 * self.num_words

    def unpack(self, rows: Float[Tensor, "n words"]) -> State:
        """Views of the parts of rows."""
        num_times = 1 + self.slots
        times = rows[:, : 2 * num_times].view(torch.float64)
        begin = 2 * num_times
        memory = rows[:, begin : begin + self.dim]
        mail = rows[:, begin + self.dim : begin + self.dim + self.slots * self.mail_dim]
        if self.slots == 1:
            return State(memory, times[:, 0], mail, times[:, 1])
        mail = mail.unflatten(1, (self.slots, self.mail_dim))
        return State(memory, times[:, 0], mail, times[:, 1:])

    def pack(self, state: State) -> Float[Tensor, "n words"]:
        """Rows made of the parts."""
        rows = state.memory.new_zeros(len(state.memory), self.num_words, dtype=torch.float32)
        for part, given in zip(self.unpack(rows), state, strict=True):
            part.copy_(given)
        return rows
