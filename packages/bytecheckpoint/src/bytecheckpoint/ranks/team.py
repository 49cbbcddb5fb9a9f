"""The ranks that save and load together, and how they agree.

Messages use a separate gloo group (`Group.control`), so that they do not mix with the collectives
of training. Background threads report through the group's store; a rank whose process ends is
known by its connection (`liveness`), one that hangs by its missing key. Without a process group, a
process is a team of one.
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
from bytecheckpoint.ranks.liveness import Liveness
from shared.comms import Group, ProcessGroup, all_gather_v, all_reduce, tree
from shared.errors import CommError

__all__ = ["Team"]

_LOOK_S = 0.2
"""Seconds between two looks for dead ranks while waiting."""

_SHORTEST_S = 0.001
"""A store takes a wait of no time for one without an end."""


class Team:
    """All ranks of the world or of one process group, or this process alone.

    Attributes:
        rank: this process's rank; rank 0 is the coordinator.
        world_size: number of ranks.
        group: gloo group of their messages, None for a single process.
    """

    def __init__(self, process_group: ProcessGroup | None = None) -> None:
        """Every rank makes its team at the same place in its program, the first time.

        Args:
            process_group: whose ranks form the team; None: all of the world.

        Raises:
            ConfigError: this process is not in the group.
        """
        self.group = Group.control(process_group) if Group.exists() else None
        self.rank = self.group.rank if self.group else 0
        self.world_size = self.group.world_size if self.group else 1
        self._alone: dict[str, bytes] = {}
        self._liveness: Liveness | None = None
        self._store: Any = self.group.board("bytecheckpoint") if self.group else None

    @property
    def is_coordinator(self) -> bool:
        """Whether this rank plans and commits."""
        return self.rank == 0

    def watch(self) -> None:
        """Lets later waits notice dead ranks at once; every rank calls it at the same place."""
        if self.group is None:
            return
        self._liveness = liveness = Liveness(self.rank, self.world_size)
        is_first = self.group.ranks[0] == 0
        address = self.broadcast(liveness.listen(is_first) if self.is_coordinator else None)
        if not self.is_coordinator:
            liveness.connect(address)

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
            CommError: ranks died, or did not report in time; the message names them.
        """
        keys = {f"{key}/{rank}": rank for rank in range(self.world_size)}
        self._wait(keys, timeout)
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
            CommError: the coordinator died, or announced nothing in time.
        """
        self._wait({key: 0}, timeout)
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

    def _wait(self, ranks: dict[str, int], timeout: timedelta) -> None:
        """Waits for keys, each of which one rank sets."""
        if self._store is None:
            return
        begin = time.monotonic()
        left_s = timeout.total_seconds()
        while True:
            # Before the wait: a rank may set its key and end.
            lost = [] if self._liveness is None else self._liveness.find_lost()
            asked_s, asked = max(min(left_s, _LOOK_S), _SHORTEST_S), time.monotonic()
            try:
                self._store.wait(list(ranks), timedelta(seconds=asked_s))
                return
            except RuntimeError as error:
                left_s = timeout.total_seconds() - (time.monotonic() - begin)
                # A store that is gone answers at once.
                if left_s > 0 and not lost and time.monotonic() - asked > asked_s / 2:
                    continue
                missing = self._find_missing(ranks)
                dead = [rank for rank in missing if rank in lost]
                if dead or left_s <= 0:
                    what = (
                        "died in the midst of a save; look at its output"
                        if dead
                        else f"did not report within {time.monotonic() - begin:.0f} s: it hangs, or "
                        f"its storage is slow; look at its output, or raise the timeout"
                    )
                    raise CommError(
                        f"rank {', '.join(map(str, dead or missing))} of {self.world_size} {what}. "
                        f"What was committed before is untouched"
                    ) from error

    def _find_missing(self, ranks: dict[str, int]) -> list[int]:
        try:
            return [rank for key, rank in ranks.items() if not self._store.check([key])]
        except RuntimeError as error:
            raise CommError(
                "the store of the process group is gone: expected the process that holds it (rank "
                "0, or torchrun's agent) to outlive the save; look at its output. What was "
                "committed before is untouched"
            ) from error


_EMPTY = torch.empty(0, dtype=torch.uint8)


def _pack(failure: Failure | None) -> bytes:
    return msgspec.msgpack.encode(failure)
