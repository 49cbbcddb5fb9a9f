"""Futures of calls, and unions of futures; both can be passed to other calls before they are done.

Passing a future to another group sends only references through the controller: each rank fetches
its own rows from the rank that made them, once they exist (HybridFlow, arXiv 2409.19256, section
4.1).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hybridflow.workers.batch.batch import Batch
from shared.errors import ConfigError

__all__ = ["Future", "Joined", "ResultPart"]


class _Rows(ABC):
    """Base of `Future` and `Joined`, which stand for a batch and can select its columns."""

    @abstractmethod
    def result(self, timeout_s: float | None = None) -> Any:
        """Waits for the result."""

    def __getitem__(self, name: str) -> Any:
        return self.result()[name]

    def __contains__(self, name: object) -> bool:
        return name in self.result()

    def __len__(self) -> int:
        return len(self.result())

    def __or__(self, other: Batch | _Rows) -> Joined:
        return Joined([*_operands(self), *_operands(other)])

    def __ror__(self, other: Batch) -> Joined:
        return Joined([*_operands(other), *_operands(self)])

    def share(self, index: int, count: int) -> Joined:
        """Rows of part `index` of `count` even parts, such as one mini-batch of an update.

        Raises:
            ConfigError: if `index` is not in 0..count - 1.
        """
        if not 0 <= index < count:
            raise ConfigError(f"expected a part of 0..{count - 1}, got {index}")
        return Joined(_operands(self), share=(index, count))

    def select(self, *names: str) -> Joined:
        """Only some columns; the others are not sent."""
        operands = _operands(self)
        if len(operands) > 1:
            raise ConfigError(
                "expected the future of one call; select columns before futures are joined"
            )
        return Joined([(operands[0][0], names)])


@dataclass(frozen=True, slots=True)
class ResultPart:
    """One collector's result: the engine's handle, and the number of rows if it is a batch."""

    handle: Any
    num_rows: int | None


class Future(_Rows):
    """The result of one call; made by calling a group's method."""

    def __init__(self, name: str, wait: Callable[[Future, float | None], None]) -> None:
        """Makes a future that is not done.

        Args:
            name: of group and method, for messages.
            wait: returns when the future is done, or raises.
        """
        self.name = name
        self._wait = wait
        self.error: BaseException | None = None
        self.is_done = False
        # Set when done: the collectors' results, and how they are joined.
        self.parts: list[ResultPart] = []
        self.has_rows = False
        self.is_list = False
        self.read: Callable[[], Any] | None = None
        self._value: list[Any] = []

    def result(self, timeout_s: float | None = None) -> Any:
        """Waits for the result.

        Args:
            timeout_s: longest wait in seconds; unlimited when None.

        Raises:
            RankFailure: if a rank raised or died; the message has its traceback.
            TimeoutError: if the call is not done by then; it continues.
        """
        if not self._value:
            self._wait(self, timeout_s)
            assert self.read is not None, "done, so there is something to read"
            self._value.append(self.read())
        return self._value[0]

    def __repr__(self) -> str:
        state = "failed" if self.error else "done" if self.is_done else "under way"
        return f"Future({self.name}, {state})"


class Joined(_Rows):
    """The union of the columns of several futures and batches."""

    def __init__(
        self,
        operands: Sequence[tuple[Batch | Future, Sequence[str] | None]],
        share: tuple[int, int] = (0, 1),
    ) -> None:
        """Joins operands, each with all columns (None) or some, and takes one part of the rows."""
        self.operands = list(operands)
        self._share = share

    @property
    def is_done(self) -> bool:
        """Whether all operands are done, or have failed."""
        return all(source.is_done for source, _ in self.operands if isinstance(source, Future))

    def window(self, num_rows: int) -> range:
        """The range of rows that the share selects, of `num_rows`."""
        index, count = self._share
        return range(num_rows * index // count, num_rows * (index + 1) // count)

    def result(self, timeout_s: float | None = None) -> Batch:
        """Waits for all operands, and joins them in this process.

        Raises:
            RankFailure, TimeoutError: as `Future.result`.
            DataError: if operands differ in length, or in a column that several have.
        """
        whole: Batch | None = None
        for source, columns in self.operands:
            part = source if isinstance(source, Batch) else source.result(timeout_s)
            part = part if columns is None else part.select(*columns)
            whole = part if whole is None else whole | part
        assert whole is not None, "a union has operands"
        rows = self.window(len(whole))
        return whole if len(rows) == len(whole) else whole.rows(rows.start, rows.stop)


def _operands(value: Batch | _Rows) -> list[tuple[Batch | Future, Sequence[str] | None]]:
    if isinstance(value, Joined):
        return value.operands
    if isinstance(value, Batch | Future):
        return [(value, None)]
    raise ConfigError(f"expected a Batch or the future of one, got a {type(value).__name__}")
