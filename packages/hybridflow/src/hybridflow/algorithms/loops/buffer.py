"""Bookkeeping of the asynchronous loop: which prompts may start, which responses to train on next.

Prompts are positions in an endless stream, of which batch i is [i B, (i + 1) B). The number of
prompts in progress follows AReaL's rule (arXiv 2505.24298). AReaL trains on the responses that
finish first, so that a slow one may exceed the staleness bound; here batches are trained on in the
order of the stream, so that the bound holds for every response, and the content of a batch does not
depend on timing.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from typing import Any

from shared.errors import ConfigError

__all__ = ["Buffer", "admitted"]


def admitted(
    *,
    running: int,
    accepted: int,
    version: int,
    batch_size: int,
    eta: int,
    max_running: int | None = None,
) -> int:
    """Number of further prompts that may start.

    Args:
        running: prompts in progress.
        accepted: prompts finished so far, those trained on included.
        version: training steps done.
        batch_size: prompts per step.
        eta: bound on staleness, in steps between the weights that generate and those trained.
        max_running: most prompts in progress; no bound when None.

    Returns:
        min(max_running - running, (eta + version + 1) batch_size - (accepted + running)), not below
        0.
    """
    left = (eta + version + 1) * batch_size - (accepted + running)
    return max(0, left if max_running is None else min(left, max_running - running))


class Buffer:
    """Prompts in progress, and finished ones until they are trained on.

    The rows stored for a prompt may be any object.

    Example:
        >>> buffer = Buffer(batch_size=2, eta=0)
        >>> buffer.admit(0, 3), buffer.admit(0, 3)
        ([0, 1], [])
        >>> buffer.finish(1, 0, "b"), buffer.take(0), buffer.finish(0, 0, "a"), buffer.take(0)
        (None, None, None, (['a', 'b'], [0, 0]))
    """

    def __init__(
        self, *, batch_size: int, eta: int, max_running: int | None = None, version: int = 0
    ) -> None:
        """Makes a buffer without prompts in progress.

        Args:
            batch_size: prompts per step.
            eta: as in `admitted`.
            max_running: as in `admitted`.
            version: training steps done.

        Raises:
            ConfigError: if a number is out of range.
        """
        if batch_size < 1 or min(eta, version) < 0 or (max_running is not None and max_running < 1):
            raise ConfigError(
                f"buffer: expected batch_size and max_running of at least 1, and eta and version "
                f"of at least 0, got {batch_size}, {max_running}, {eta} and {version}"
            )
        self.batch_size, self.eta, self.max_running = batch_size, eta, max_running
        self._next = self._accepted = version * batch_size
        self._returned: list[int] = []
        self._running: set[int] = set()
        self._finished: dict[int, tuple[int, Any]] = {}

    @property
    def num_running(self) -> int:
        """Number of prompts in progress."""
        return len(self._running)

    def room(self, version: int) -> int:
        """Number of further prompts that may start after `version` training steps."""
        return admitted(
            running=len(self._running), accepted=self._accepted, version=version,
            batch_size=self.batch_size, eta=self.eta, max_running=self.max_running,
        )  # fmt: skip

    def admit(self, version: int, most: int) -> list[int]:
        """Starts the next prompts of one batch; those given back come first.

        Args:
            version: training steps done, which is the version of the weights to generate with.
            most: largest number of prompts.

        Returns:
            Their positions, ascending.
        """
        found: list[int] = []
        for _ in range(min(most, self.room(version))):
            position = self._returned[0] if self._returned else self._next
            if found and position // self.batch_size != found[0] // self.batch_size:
                break
            if self._returned:
                del self._returned[0]
            else:
                self._next += 1
            found.append(position)
        self._running.update(found)
        return found

    def give_back(self, positions: Sequence[int]) -> None:
        """Queues prompts again whose responses will not come."""
        for position in positions:
            self._running.remove(position)
            bisect.insort(self._returned, position)

    def finish(self, position: int, version: int, rows: Any) -> None:
        """Stores the responses to a prompt, generated with the weights of a version."""
        self._running.remove(position)
        self._finished[position] = (version, rows)
        self._accepted += 1

    def take(self, version: int) -> tuple[list[Any], list[int]] | None:
        """Removes and returns the batch of step `version`, if all of it is finished.

        Returns:
            The rows of its prompts, in order, and the versions that generated them; else None.
        """
        wanted = range(version * self.batch_size, (version + 1) * self.batch_size)
        if not all(position in self._finished for position in wanted):
            return None
        found = [self._finished.pop(position) for position in wanted]
        return [rows for _, rows in found], [drawn for drawn, _ in found]

    def state(self) -> dict[str, Any]:
        """The buffer as plain data and rows; prompts in progress are stored as queued."""
        positions = sorted(self._finished)
        return {
            "next": self._next,
            "waiting": sorted([*self._returned, *self._running]),
            "accepted": self._accepted,
            "finished": positions,
            "versions": [self._finished[position][0] for position in positions],
            "rows": [self._finished[position][1] for position in positions],
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restores the result of `state`."""
        self._next, self._accepted = state["next"], state["accepted"]
        self._returned, self._running = list(state["waiting"]), set()
        kept = zip(state["versions"], state["rows"], strict=True)
        self._finished = dict(zip(state["finished"], kept, strict=True))
