"""Messages between the stages of a generating pipeline, sent around a ring.

There are as many groups of places as stages, and each stage works on another group. After every
pass all stages send at once: hidden states go to the next stage, and the tokens drawn by the last
stage go to the first, which passes them on with the next hidden states. So a stage waits only for
its neighbour, and receives a group's tokens just before it needs them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hybridflow.models.decoder import Decoder
from hybridflow.rollout.native.slots import SlotTable
from shared.comms.courier import post_rounds
from shared.comms.group import Group
from shared.comms.rounds import Round

__all__ = ["Message", "Ring"]


class Message:
    """Tokens and hidden states of a group of places, side by side in one buffer.

    Attributes:
        tokens: the newest tokens, int64 [places].
        hidden: hidden states, [places, dim].
        num_sent: number of places in use when it was last sent.
    """

    def __init__(self, num_places: int, model: Decoder) -> None:
        """Allocates the buffer, for a group of `num_places`."""
        width, kind = model.config.hidden_size, model.cos.dtype
        self._num_head_bytes, self._num_row_bytes = 8 * num_places, width * kind.itemsize
        size = num_places * (8 + self._num_row_bytes)
        self._raw = torch.empty(size, dtype=torch.uint8, device=model.cos.device)
        self.tokens = self._raw[: self._num_head_bytes].view(torch.int64)
        self.hidden = self._raw[self._num_head_bytes :].view(kind).view(num_places, width)
        self.num_sent = 0

    def to_first(self, num_places: int) -> Tensor | None:
        """The part that the last stage sends to the first, tokens only; None if empty."""
        return self._raw[: self._num_head_bytes] if num_places else None

    def to_next(self) -> Tensor | None:
        """The part that a stage sends to the next; None if empty."""
        if not self.num_sent:
            return None
        return self._raw[: self._num_head_bytes + self.num_sent * self._num_row_bytes]


class Ring:
    """The messages of all groups of places, one group per stage.

    Pass k belongs to group k modulo the number of groups. The first stage starts passes in this
    order, and each other stage runs one pass behind the stage before it.
    """

    def __init__(self, group: Group | None, model: Decoder, places: Sequence[SlotTable]) -> None:
        """Allocates the messages; `group` is the stages' group, None if the model has one stage."""
        self._group, self._shard, self._places = group, model.shard, places
        self.messages = [Message(len(mine), model) for mine in places]

    def turn(self, done: int) -> None:
        """Sends the result of pass `done` (-1 before the first), receives the next pass's input.

        All stages hold the same state, so each knows which messages are not empty; once all samples
        have ended, only the tokens that end them are still passed on.
        """
        if self._group is None:
            return
        sent = None
        if done >= 0:
            message, num_places = self._of(done)
            sent = message.to_first(num_places) if self._shard.is_last else message.to_next()
        message, num_places = self._of(done + 1)
        message.num_sent = num_places
        if not self._shard.is_first:
            received = message.to_next()
        else:
            is_back = done + 1 >= len(self.messages)
            received = message.to_first(num_places) if is_back else None
        rank, size = self._group.rank, self._group.world_size
        item = Round(
            send_to=(rank + 1) % size, send=sent, recv_from=(rank - 1) % size, recv=received
        )
        post_rounds(self._group, [item], "generation", op="pipeline").wait_all()

    def _of(self, number: int) -> tuple[Message, int]:
        at = number % len(self.messages)
        return self.messages[at], len(self._places[at])
