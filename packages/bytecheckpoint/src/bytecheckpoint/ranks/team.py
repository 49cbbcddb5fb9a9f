"""The ranks that save and load together, and how they agree.

Messages use a separate gloo group (`Group.control`), so that they do not mix with the collectives
of training. Background threads report through the group's store, where a dead rank is detected by
its missing key. Without a process group, a process is a team of one.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import msgspec
import torch

from bytecheckpoint.ranks.failure import Failure
from shared.comms import Group, all_gather_v, all_reduce, tree
from shared.errors import CommError

__all__ = ["Team"]


class Team:
    """All ranks of the world, or this process alone.

    Attributes:
        rank: this process's rank; rank 0 is the coordinator.
        world_size: number of ranks.
        group: gloo group of their messages, None for a single process.
    """

    def __init__(self) -> None:
        """Every rank makes its team at the same place in its program, the first time."""
        self.group = Group.control() if Group.exists() else None
        self.rank = self.group.rank if self.group else 0
        self.world_size = self.group.world_size if self.group else 1
        self._alone: dict[str, bytes] = {}
        self._store: Any = self.group.board("bytecheckpoint") if self.group else None

    @property
    def is_coordinator(self) -> bool:
        """Whether this rank plans and commits."""
        return self.rank == 0

    def maximum(self, numbers: list[int]) -> list[int]:
        """The maximum of each number over all ranks; numbers of up to 63 bits."""
        if self.group is None:
            return numbers
        return all_reduce(self.group, torch.tensor(numbers), "max").tolist()

    def total(self, numbers: torch.Tensor) -> torch.Tensor:
        """The sum of each number over all ranks, in place."""
        return numbers if self.group is None else all_reduce(self.group, numbers, "sum")

    def agree(self, error: Exception | None) -> None:
        """Raises the same exception on all ranks if any of them failed.

        Args:
            error: this rank's failure, None if it has none.

        Raises:
            Exception: the error of the lowest rank that failed.
        """
        if not self.maximum([error is not None])[0]:
            return
        failure = Failure.of(error, self.rank) if error is not None else None
        found = [msgspec.msgpack.decode(d, type=Failure | None) for d in self.all(_pack(failure))]
        first = next(one for one in found if one is not None)
        raise first.exception(self.world_size) from error

    def all(self, data: bytes) -> list[bytes]:
        """Every rank's bytes, on every rank."""
        if self.group is None:
            return [data]
        sent = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else _EMPTY
        return [tensor.numpy().tobytes() for tensor in all_gather_v(self.group, sent)]

    def in_all(self, names: list[str]) -> list[str]:
        """The names that all ranks passed; sends each rank at most the shortest list."""
        if self.group is None or not self.maximum([bool(names)])[0]:
            return names
        fewest = -self.maximum([-len(names)])[0]
        at = self.maximum([self.rank if len(names) == fewest else -1])[0]
        mine = "\0".join(names).encode() if self.rank == at else b""
        common = [data for data in self.all(mine) if data]
        given = common[0].decode().split("\0") if common else []
        own = set(names)
        is_here = torch.tensor([name in own for name in given], dtype=torch.uint8)
        if given:
            all_reduce(self.group, is_here, "min")
        return [name for name, here in zip(given, is_here.tolist(), strict=True) if here]

    def gather(self, data: bytes, merge: Callable[[list[bytes]], bytes]) -> bytes | None:
        """Merges every rank's bytes up a tree; the result on the coordinator, None elsewhere."""
        if self.group is None:
            return merge([data])
        return tree.gather(self.group, data, merge)

    def scatter(self, parts: list[bytes] | None) -> bytes:
        """Sends each rank its bytes from the coordinator, down a tree."""
        if self.group is None:
            assert parts is not None, "alone one is the coordinator"
            return parts[0]
        return tree.scatter(self.group, parts)

    def broadcast(self, data: bytes | None) -> bytes:
        """The coordinator's bytes on all ranks."""
        if self.group is None:
            assert data is not None, "alone one is the coordinator"
            return data
        return tree.broadcast(self.group, data)

    def report(self, key: str, data: bytes) -> None:
        """Stores bytes for the coordinator, from any thread."""
        self._post(f"{key}/{self.rank}", data)

    def reports(self, key: str, timeout: timedelta) -> list[bytes]:
        """What all ranks reported, on the coordinator.

        Raises:
            CommError: ranks did not report in time; the message names them.
        """
        keys = [f"{key}/{rank}" for rank in range(self.world_size)]
        self._wait(keys, timeout, lambda missing: f"rank {', '.join(missing)} of {self.world_size}")
        found = [self._take(key) for key in keys]
        for one in keys:
            self._forget(one)
        return found

    def announce(self, key: str, data: bytes) -> None:
        """Stores the coordinator's bytes for all ranks."""
        self._post(key, data)

    def announced(self, key: str, timeout: timedelta) -> bytes:
        """Waits for the coordinator's bytes.

        Raises:
            CommError: the coordinator announced nothing in time.
        """
        self._wait([key], timeout, lambda _: "the coordinator, rank 0,")
        return self._take(key)

    def forget(self, key: str) -> None:
        """Deletes the coordinator's bytes from the store."""
        self._forget(key)

    def _post(self, key: str, data: bytes) -> None:
        if self._store is None:
            self._alone[key] = data
        else:
            self._store.set(key, data)

    def _take(self, key: str) -> bytes:
        return self._alone[key] if self._store is None else self._store.get(key)

    def _forget(self, key: str) -> None:
        if self._store is None:
            self._alone.pop(key, None)
        else:
            with suppress(RuntimeError):
                self._store.delete_key(key)

    def _wait(self, keys: list[str], timeout: timedelta, blame: Callable[[list[str]], str]) -> None:
        if self._store is None:
            return
        deadline = time.monotonic() + timeout.total_seconds()
        try:
            self._store.wait(keys, timeout)
        except RuntimeError as error:
            missing = [key.rpartition("/")[2] for key in keys if not self._store.check([key])]
            waited_s = timeout.total_seconds() + time.monotonic() - deadline
            raise CommError(
                f"{blame(missing)} did not report within {waited_s:.0f} s: it died or hangs; look "
                f"at its output, or raise the timeout if its storage is slow. What was committed "
                f"before is untouched"
            ) from error


_EMPTY = torch.empty(0, dtype=torch.uint8)


def _pack(failure: Failure | None) -> bytes:
    return msgspec.msgpack.encode(failure)
