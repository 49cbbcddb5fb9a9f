"""Rounds of messages: what a rank sends and receives in each, their schedule, and its handle."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from shared.comms.group import Group
from shared.errors import CommError, ConfigError

__all__ = ["PendingRounds", "Round", "RoundSchedule", "ring_rounds", "shorten"]

Payload = Tensor | Callable[[], Tensor | None] | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Round:
    """One rank's send and receive in one round.

    Attributes:
        send_to: rank in the group to send to.
        send: contiguous tensor to send, or a function without arguments that returns it; the
            courier calls it just before the send, so that only that round's message is packed.
            None or an empty tensor sends nothing.
        recv_from: rank in the group to receive from.
        recv: contiguous tensor to receive into, of exactly the size the peer sends; None or an
            empty tensor receives nothing.
    """

    send_to: int
    send: Payload
    recv_from: int
    recv: Tensor | None


class PendingRounds(ABC):
    """Handle of posted rounds.

    Attributes:
        seconds_waited: time the caller spent blocked in `wait` and `wait_all`, in seconds.
        round_s: duration of each round in seconds; NaN for a round that has not ended and on GPUs,
            where rounds run on a stream and are not timed.
    """

    def __init__(self, num_rounds: int) -> None:
        self.seconds_waited = 0.0
        self.round_s = [float("nan")] * num_rounds

    def __len__(self) -> int:
        return len(self.round_s)

    def wait(self, index: int) -> None:
        """Block until the tensor that round `index` receives is complete.

        The tensors it sends may only be written to again after `wait_all`.

        Raises:
            CommError: if this round or one before it failed; names rank, peer, round and phase.
        """
        self._timed(lambda: self._wait(index))

    def wait_all(self) -> None:
        """Block until every round has ended and all buffers may be reused.

        Raises:
            CommError: if a round failed.
        """
        self._timed(self._wait_all)

    def _timed(self, block: Callable[[], None]) -> None:
        start = time.perf_counter()
        try:
            block()
        finally:
            self.seconds_waited += time.perf_counter() - start

    @abstractmethod
    def _wait(self, index: int) -> None: ...

    @abstractmethod
    def _wait_all(self) -> None: ...


@dataclass(frozen=True, slots=True)
class RoundSchedule:
    """One rank's side of rounds that belong together.

    Attributes:
        group: group whose ranks exchange the messages.
        rounds: this rank's side, in order.
        phase: name of the program's phase, for the ledger and for errors.
        op: name of the operation in the ledger.
        at_once: whether all messages start together.

    Raises:
        ConfigError: a peer is not in the group, or a tensor cannot be sent.
    """

    group: Group
    rounds: Sequence[Round]
    phase: str
    op: str
    at_once: bool

    def __post_init__(self) -> None:
        """Checks the peers and the tensors that are known already."""
        for index, item in enumerate(self.rounds):
            _check(self.group, item, index)

    def made(self, index: int) -> Tensor | None:
        """The tensor to send in a round, made by calling `send` if that is a function."""
        send = self.rounds[index].send
        if callable(send) and not isinstance(send, Tensor):
            send = send()
            if send is not None:
                _check_tensor(self.group, send, index)
        return send if send is not None and send.numel() else None

    def record(self, peer: int, tensor: Tensor, direction: Literal["sent", "received"]) -> None:
        """Counts a message in the group's ledger."""
        num_bytes = tensor.numel() * tensor.element_size()
        world_rank = self.group.ranks[peer]
        self.group.ledger.record(self.op, world_rank, num_bytes, self.phase, direction=direction)

    @contextmanager
    def blame(self, index: int, verb: str, peer: int) -> Iterator[None]:
        """Raises what gloo or NCCL raised as a `CommError` that names round and peer."""
        try:
            yield
        except RuntimeError as error:
            raise self.failure(index, verb, peer, error) from error

    def failure(self, index: int, verb: str, peer: int, error: RuntimeError) -> CommError:
        """The error of a round that failed, which names both ranks."""
        ranks = self.group.ranks
        return CommError(
            f"rank {ranks[self.group.rank]}: {verb} rank {ranks[peer]} failed in round {index} of "
            f"{len(self.rounds)} of phase {self.phase!r} ({self.op}): {shorten(error)}. Rank "
            f"{ranks[peer]} died, hangs or disagrees on the message; look at its own output, or "
            f"raise the group's timeout ({self.group.timeout.total_seconds():g} s) if it is slow"
        )


def ring_rounds(group: Group, sends: Sequence[Tensor], recvs: Sequence[Tensor]) -> list[Round]:
    """The rounds in which every pair of ranks exchanges a tensor; none sends to itself.

    Args:
        group: group whose ranks take part.
        sends: one contiguous tensor per rank, by rank in the group.
        recvs: one contiguous tensor per rank, of the sizes that the peers send.
    """
    size, rank = group.world_size, group.rank
    return [
        Round(
            send_to=(rank + shift) % size,
            send=sends[(rank + shift) % size],
            recv_from=(rank - shift) % size,
            recv=recvs[(rank - shift) % size],
        )
        for shift in range(1, size)
    ]


def shorten(error: RuntimeError) -> str:
    """The sentence of gloo's message that describes the failure, without two of general advice."""
    return str(error).splitlines()[0].split(". This is typically")[0].rstrip(". ")


def _check(group: Group, item: Round, index: int) -> None:
    for peer, payload in ((item.send_to, item.send), (item.recv_from, item.recv)):
        if payload is None:
            continue
        if not 0 <= peer < group.world_size or peer == group.rank:
            raise ConfigError(
                f"round {index}: rank {group.rank} of {group.world_size} needs another rank of "
                f"the group as its peer, got {peer}; copy locally what a rank keeps"
            )
        if isinstance(payload, Tensor):
            _check_tensor(group, payload, index)


def _check_tensor(group: Group, tensor: Tensor, index: int) -> None:
    if tensor.device.type != group.device.type:
        raise ConfigError(
            f"round {index}: the {group.backend} backend moves {group.device.type} tensors, got "
            f"one on {tensor.device}; copy it to {group.device.type} first"
        )
    if not tensor.is_contiguous():
        raise ConfigError(
            f"round {index}: a message must be contiguous, got shape {tuple(tensor.shape)} with "
            f"strides {tensor.stride()}; call .contiguous() or slice rows only"
        )
