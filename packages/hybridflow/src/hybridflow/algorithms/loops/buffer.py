"""Which prompts may be drawn for, and which responses are learnt from next: bookkeeping alone.

Prompts are positions in an endless stream, of which batch i is [i B, (i + 1) B). How many may be under
way is AReaL's rule (arXiv 2505.24298). AReaL learns from what is finished first, which lets a slow
response grow older than the bound while others pass it; here batches are learnt from in the order
of the stream, so that the bound holds for each response, and what a batch consists of does not
depend on who was faster.
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
    """How many more prompts may be drawn for.

    Args:
        running: prompts under way.
        accepted: prompts finished so far, those learnt from included.
        version: steps learnt so far.
        batch_size: prompts of a step.
        eta: most steps that lie between the weights that draw and those that learn.
        max_running: most prompts under way; no bound when None.

    Returns:
        min(max_running - running, (eta + version + 1) batch_size - (accepted + running)), not below
        0.
    """
    left = (eta + version + 1) * batch_size - (accepted + running)
    return max(0, left if max_running is None else min(left, max_running - running))


class Buffer:
    """Prompts under way, and finished ones until they are learnt from.

    What is kept for a prompt may be anything.

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
        """Begins with nothing under way.

        Args:
            batch_size: prompts of a step.
            eta: as of `admitted`.
            max_running: as of `admitted`.
            version: steps learnt so far.

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
        """Prompts under way."""
        return len(self._running)

    def room(self, version: int) -> int:
        """How many more prompts may be drawn for, `version` steps having been learnt."""
        return admitted(
            running=len(self._running), accepted=self._accepted, version=version,
            batch_size=self.batch_size, eta=self.eta, max_running=self.max_running,
        )  # fmt: skip

    def admit(self, version: int, most: int) -> list[int]:
        """Takes the next prompts of one batch; those that were given back come first.

        Args:
            version: steps learnt so far, with whose weights they are to be drawn for.
            most: how many at most.

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
        """Makes prompts wait again whose responses will not come."""
        for position in positions:
            self._running.remove(position)
            bisect.insort(self._returned, position)

    def finish(self, position: int, version: int, rows: Any) -> None:
        """Keeps the responses to a prompt under way, drawn with the weights of a version."""
        self._running.remove(position)
        self._finished[position] = (version, rows)
        self._accepted += 1

    def take(self, version: int) -> tuple[list[Any], list[int]] | None:
        """The batch that is learnt from after `version` steps, if all of it is finished.

        Returns:
            What was kept for its prompts, in order, and the versions that drew.
        """
        wanted = range(version * self.batch_size, (version + 1) * self.batch_size)
        if not all(position in self._finished for position in wanted):
            return None
        found = [self._finished.pop(position) for position in wanted]
        return [rows for _, rows in found], [drawn for drawn, _ in found]

    def state(self) -> dict[str, Any]:
        """All of it, in plain data beside what is kept for prompts; those under way wait again."""
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
        """Takes what `state` gave."""
        self._next, self._accepted = state["next"], state["accepted"]
        self._returned, self._running = list(state["waiting"]), set()
        kept = zip(state["versions"], state["rows"], strict=True)
        self._finished = dict(zip(state["finished"], kept, strict=True))
