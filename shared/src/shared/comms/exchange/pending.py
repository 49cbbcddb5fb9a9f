"""The handle of an exchange in progress: over rounds on CPUs, by one collective on GPUs."""

from __future__ import annotations

import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from shared.comms.courier import post_rounds
from shared.comms.group import Group
from shared.comms.rounds import ring_rounds, shorten
from shared.errors import CommError

__all__ = ["CollectiveExchange", "PendingExchange", "RoundsExchange"]

_OP = "exchange"
# Bytes that no message is likely to end with, to notice a message without its last row.
_MARK = torch.tensor([*secrets.token_bytes(16)], dtype=torch.uint8)
_MIN_MARK_BYTES = 8


class PendingExchange(ABC):
    """Handle of an exchange in progress.

    Attributes:
        rows: rows received [sum(recv_sizes), ...], those of rank 0 first; complete once `wait` has
            returned.
        seconds_waited: time the caller spent blocked in `wait`, in seconds. On GPUs that is the
            host's, next to nothing: there `wait` orders streams.
    """

    def __init__(self, rows: Tensor, recv_sizes: Sequence[int]) -> None:
        self.rows = rows.new_empty((sum(recv_sizes), *rows.shape[1:]))
        self.seconds_waited = 0.0

    def wait(self) -> Tensor:
        """Blocks until all rows have been received and sent; on a GPU, its stream does.

        Returns:
            `rows`.

        Raises:
            CommError: a peer died, the timeout passed or a peer sent fewer rows than expected;
                names rank, peer and phase.
        """
        start = time.perf_counter()
        try:
            self._wait()
        finally:
            self.seconds_waited += time.perf_counter() - start
        return self.rows

    @abstractmethod
    def _wait(self) -> None: ...


class RoundsExchange(PendingExchange):
    """An exchange by rounds: in round r, rank i sends to rank i + r and receives from rank i - r."""

    def __init__(
        self,
        group: Group,
        rows: Tensor,
        send_sizes: Sequence[int],
        recv_sizes: Sequence[int],
        phase: str,
        lane: str,
    ) -> None:
        super().__init__(rows, recv_sizes)
        self._group, self._phase = group, phase
        sends, recvs = rows.split(list(send_sizes)), self.rows.split(list(recv_sizes))
        # gloo ends a receive without an error if the message is shorter than the tensor.
        self._tails = {
            peer: tail
            for peer, piece in enumerate(recvs)
            if peer != group.rank and (tail := _last_bytes(piece)) is not None
        }
        for tail in self._tails.values():
            tail.copy_(_MARK[: len(tail)])
        rounds = ring_rounds(group, sends, recvs)
        self._rounds = post_rounds(group, rounds, phase, op=_OP, lane=lane)
        recvs[group.rank].copy_(sends[group.rank])
        self._recv_sizes = recv_sizes

    def _wait(self) -> None:
        self._rounds.wait_all()
        ranks = self._group.ranks
        for peer, tail in self._tails.items():
            if torch.equal(tail, _MARK[: len(tail)]):
                raise CommError(
                    f"rank {ranks[self._group.rank]}: expected {self._recv_sizes[peer]} rows from "
                    f"rank {ranks[peer]} in phase {self._phase!r}, got fewer; both ranks must pass "
                    f"the same number, in send_sizes and in recv_sizes"
                )


def _last_bytes(piece: Tensor) -> Tensor | None:
    """The bytes at the end of the last row, up to a mark's; None if they are too few for one."""
    if not piece.numel() or piece[0].nbytes < _MIN_MARK_BYTES:
        return None
    return piece[-1].reshape(-1).view(torch.uint8)[-len(_MARK) :]


class CollectiveExchange(PendingExchange):
    """An exchange by torch's `all_to_all_single`."""

    def __init__(
        self,
        group: Group,
        rows: Tensor,
        send_sizes: Sequence[int],
        recv_sizes: Sequence[int],
        phase: str,
    ) -> None:
        super().__init__(rows, recv_sizes)
        self._group, self._phase = group, phase
        sizes = list(recv_sizes), list(send_sizes)
        try:
            self._work = dist.all_to_all_single(
                self.rows, rows, *sizes, group=group.checked(), async_op=True
            )
        except RuntimeError as error:
            raise self._failure(error) from error
        self._record(rows[:1].nbytes, send_sizes, "sent")
        self._record(self.rows[:1].nbytes, recv_sizes, "received")

    def _wait(self) -> None:
        try:
            if self._work is not None:  # None only outside of a group
                self._work.wait()
        except RuntimeError as error:
            raise self._failure(error) from error

    def _record(
        self, row_bytes: int, sizes: Sequence[int], direction: Literal["sent", "received"]
    ) -> None:
        group = self._group
        for peer, size in enumerate(sizes):
            if size and peer != group.rank:
                num_bytes, world_rank = size * row_bytes, group.ranks[peer]
                group.ledger.record(_OP, world_rank, num_bytes, self._phase, direction=direction)

    def _failure(self, error: RuntimeError) -> CommError:
        ranks = self._group.ranks
        return CommError(
            f"rank {ranks[self._group.rank]}: the exchange among ranks {list(ranks)} failed in "
            f"phase {self._phase!r}: {shorten(error)}. A peer died, hangs or disagrees on the "
            f"number of rows; look at the other ranks' output"
        )
