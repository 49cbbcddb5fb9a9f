"""Workers in the controller's own process, one call after another: for debuggers and small runs.

Values are serialised as for another process, so that a worker cannot see or change the caller's
objects, and a script that runs here also runs on the other engines.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hybridflow.workers.engines.packing import decode, encode
from hybridflow.workers.engines.rank import RankExecutor, RankTask, Reply

__all__ = ["InlineEngine"]


class _Store:
    def pack(self, value: Any) -> tuple[bytes, list[bytearray]]:
        data, buffers = encode(value)
        return data, [bytearray(buffer.raw()) for buffer in buffers]

    def load(
        self,
        handle: tuple[bytes, list[bytearray]],
        wanted: Callable[[Any], Any] | None = None,
    ) -> Any:
        value = decode(handle[0], [bytearray(buffer) for buffer in handle[1]])
        return value if wanted is None else wanted(value)


class InlineEngine:
    """Runs each task when it is submitted."""

    name = "inline"

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self.store = _Store()
        self._executors = [RankExecutor(self.store, rank) for rank in range(num_ranks)]
        self._replies: list[Reply] = []

    def submit(self, rank: int, task: RankTask) -> None:
        """Runs a task."""
        self._replies.append(self._executors[rank].run(task))

    def receive(self, timeout_s: float | None) -> list[Reply]:
        """Replies since the last call."""
        replies, self._replies = self._replies, []
        return replies

    def close(self, is_failed: bool = False) -> None:
        """Does nothing, because no task is left running."""
