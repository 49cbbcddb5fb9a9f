"""Operations and their dependencies as integer-indexed lists, built once for many replays.

On a queue in the given order, each operation waits for the one listed before it just as for its
dependencies. A cycle among dependencies and a deadlock between queue order and dependencies are
therefore the same here: a cycle of waiting operations. The topological order is found after Kahn
("Topological sorting of large networks", 1962).
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from functools import cached_property
from math import inf, isfinite
from typing import Literal, NamedTuple, get_args

import numpy as np

from shared.errors import ConfigError, DataError

__all__ = ["Operation", "OperationGraph", "Order"]

Order = Literal["given", "readiness", "priority"]
"""Which operation a queue runs next: the next listed, the one ready for longest, or the ready one
of least `priority`."""

# Operations of a cycle beyond this number are counted instead of named in the error.
_MAX_NAMED = 12


class Operation(NamedTuple):
    """An operation that holds one queue, or several at once, for some time.

    Attributes:
        name: unique among the operations; a text, or a tuple such as `("F", stage, micro_batch)`.
        queue: queue that it holds from start to end; a tuple of queues to hold several together,
            as a message holds the sender's outgoing and the receiver's incoming link.
        duration_s: seconds for which it holds them.
        after: names of operations that must have ended; a mapping gives the seconds that must have
            passed since each one's end.
        earliest_s: earliest start in seconds.
        priority: the lowest runs first, on a "priority" queue among all that are ready, on a
            "readiness" queue among those that became ready at the same time.
    """

    name: Hashable
    queue: str | tuple[str, ...]
    duration_s: float
    after: Collection[Hashable] | Mapping[Hashable, float] = ()
    earliest_s: float = 0.0
    priority: float = 0.0


class OperationGraph:
    """The dependency graph of operations, which are numbered in the order listed.

    Attributes:
        operations: as listed.
        index: an operation's number by its name.
        queues: names of the queues; a queue's number is its index here.
        held: by operation, the numbers of its queues.
        lined: by operation, those of its queues whose order is not given, in whose waiting line it
            stands; None if every queue's order is given.
        by_priority: by queue, whether its waiting line is sorted by priority before readiness.
        needs: by operation, numbers of those that must have ended, among them the one listed before
            it on a queue in the given order.
        lagged: for operations with lags, the numbers of those that they follow with a lag, and the
            lags in seconds; `needs` holds these numbers too.
        duration_s, earliest_s, priority: by operation.
        order: numbers of all operations in topological order.
    """

    def __init__(
        self, operations: Iterable[Operation], orders: Mapping[str, str] | None = None
    ) -> None:
        self.operations = tuple(operations)
        self.index = {operation[0]: i for i, operation in enumerate(self.operations)}
        if len(self.index) != len(self.operations):
            raise DataError(_repeated(self.operations, self.index))
        for queue, order in (orders or {}).items():
            if order not in get_args(Order):
                raise ConfigError(
                    f"queue {queue!r}: the order must be one of {', '.join(get_args(Order))}, got "
                    f"{order!r}"
                )
        self._orders = None if orders is None else dict(orders)
        self.queues = list(orders or ())
        self._is_given = [order == "given" for order in (orders or {}).values()]
        self.duration_s = self.checked_s([op[2] for op in self.operations])
        self.earliest_s = self.checked_s([op[4] for op in self.operations], "earliest start")
        self.priority = [op[5] for op in self.operations]
        if not all(map(isfinite, self.priority)):
            bad = next(op for op in self.operations if not isfinite(op.priority))
            raise DataError(f"operation {bad.name!r}: priority must be finite, got {bad.priority}")
        self.held: list[tuple[int, ...]] = []
        self.needs: list[tuple[int, ...]] = []
        self.lagged: dict[int, list[tuple[int, float]]] = {}
        is_sorted = self._link()
        self.by_priority = [(orders or {}).get(queue) == "priority" for queue in self.queues]
        self.order = range(len(self.operations)) if is_sorted else self._sorted()

    def _link(self) -> bool:
        """Fills `held`, `needs` and `lagged`; returns whether the listed order is topological."""
        # One pass over all: most of the time of a single replay is spent here.
        index, number = self.index, {queue: i for i, queue in enumerate(self.queues)}
        held_by: dict[str | tuple[str, ...], tuple[int, ...]] = {}
        last: dict[int, int] = {}  # on a queue in the given order
        is_given, is_sorted = self._is_given, True
        for i, (name, queue, _, after, _, _) in enumerate(self.operations):
            held = held_by.get(queue)
            if held is None:
                held = held_by[queue] = self._numbers(name, queue, number)
            self.held.append(held)
            needed: list[int] = []
            if after:
                try:
                    needed = [index[other] for other in after]
                except KeyError as error:
                    raise DataError(self._unknown(name, after)) from error
                is_sorted = is_sorted and max(needed) < i
                # isinstance(after, Mapping) on a tuple would cost as much as all of the above.
                if type(after) not in (tuple, list):
                    self._keep_lags(i, needed, after)
            for q in held:
                if is_given[q]:
                    if q in last:
                        needed.append(last[q])
                    last[q] = i
            self.needs.append(tuple(needed))
        return is_sorted

    def _numbers(
        self, name: Hashable, queue: str | tuple[str, ...], number: dict[str, int]
    ) -> tuple[int, ...]:
        queues = (queue,) if isinstance(queue, str) else queue
        if not queues or len(set(queues)) < len(queues):
            raise DataError(
                f"operation {name!r} must hold one queue or several different ones, got {queue!r}"
            )
        for one in queues:
            if one not in number:
                if self._orders is not None:
                    raise DataError(
                        f"operation {name!r} is on the unknown queue {one!r}; the queues given are "
                        f"{', '.join(map(repr, self.queues)) or 'none'}"
                    )
                number[one] = len(self.queues)
                self.queues.append(one)
                self._is_given.append(True)
        if self._orders and {"readiness", "priority"} <= {self._orders[one] for one in queues}:
            # Two such operations could each be first in one line and second in the other.
            raise ConfigError(
                f"operation {name!r} holds {queue!r}, some in order of readiness and some of "
                "priority; give them one order"
            )
        return tuple(number[one] for one in queues)

    def _keep_lags(self, i: int, needed: list[int], after: Collection[Hashable]) -> None:
        if isinstance(after, str):
            raise DataError(self._unknown(self.operations[i].name, after))
        if not isinstance(after, Mapping):
            return
        pairs = list(zip(needed, after.values(), strict=True))
        for other, lag_s in pairs:
            if not 0 <= lag_s < inf:
                raise DataError(
                    f"operation {self.operations[i].name!r}: the lag after "
                    f"{self.operations[other].name!r} must be finite and not negative, got {lag_s} "
                    "s; to start before another's end, split that one in two"
                )
        if lagged := [(other, float(lag_s)) for other, lag_s in pairs if lag_s]:
            self.lagged[i] = lagged

    def _unknown(self, name: Hashable, after: Collection[Hashable]) -> str:
        if isinstance(after, str):
            return (
                f"operation {name!r}: after must be a collection of names, got the text {after!r}; "
                f"write ({after!r},)"
            )
        other = next(other for other in after if other not in self.index)
        return f"operation {name!r} comes after the unknown operation {other!r}; list that one too"

    def checked_s(
        self, times_s: Sequence[float] | np.ndarray, what: str = "duration"
    ) -> list[float]:
        """One time for each operation as plain floats.

        Raises:
            DataError: if there are more or fewer, or one is negative or not finite.
        """
        times = np.asarray(times_s, dtype=float)
        if times.shape != (len(self.operations),):
            raise DataError(
                f"expected one {what} for each of the {len(self.operations)} operations, got "
                f"an array {list(times.shape)}"
            )
        if not (np.isfinite(times) & (times >= 0)).all():
            i = int(np.argmin(np.isfinite(times) & (times >= 0)))
            raise DataError(
                f"operation {self.operations[i].name!r}: the {what} must be finite and not "
                f"negative, got {times[i]} s"
            )
        return times.tolist()

    @cached_property
    def lined(self) -> list[tuple[int, ...]] | None:
        """See the class."""
        if all(self._is_given):
            return None
        kinds = {held: tuple(q for q in held if not self._is_given[q]) for held in set(self.held)}
        return [kinds[held] for held in self.held]

    @cached_property
    def followers(self) -> list[list[int]]:
        """By operation, those that wait for it: the inverse of `needs`."""
        found: list[list[int]] = [[] for _ in self.operations]
        for i, needed in enumerate(self.needs):
            for other in needed:
                found[other].append(i)
        return found

    @cached_property
    def laggards(self) -> dict[int, list[tuple[int, float]]]:
        """By operation, those that wait for it with a lag: the inverse of `lagged`."""
        found: dict[int, list[tuple[int, float]]] = {}
        for i, pairs in self.lagged.items():
            for other, lag_s in pairs:
                found.setdefault(other, []).append((i, lag_s))
        return found

    def dependencies(self, i: int) -> dict[int, float]:
        """Numbers of the operations in operation `i`'s `after`, with their lags in seconds."""
        after = self.operations[i].after
        lag_s = after if isinstance(after, Mapping) else dict.fromkeys(after, 0.0)
        return {self.index[name]: float(lag) for name, lag in lag_s.items()}

    def _sorted(self) -> list[int]:
        unmet, followers = list(map(len, self.needs)), self.followers
        order = [i for i, count in enumerate(unmet) if not count]
        for i in order:
            for other in followers[i]:
                unmet[other] -= 1
                if not unmet[other]:
                    order.append(other)
        if len(order) < len(self.operations):
            raise DataError(self._circle(unmet))
        return order

    def _circle(self, unmet: list[int]) -> str:
        """Error text that names the operations of one cycle, each with the one it waits for."""
        path: list[int] = []
        place: dict[int, int] = {}
        i = next(i for i, count in enumerate(unmet) if count)
        while i not in place:
            place[i] = len(path)
            path.append(i)
            i = next(other for other in self.needs[i] if unmet[other])
        circle = path[place[i] :]
        lines, is_deadlock = [], False
        for i, other in zip(circle, [*circle[1:], circle[0]], strict=True):
            why = "comes after"
            if other not in self.dependencies(i):
                both = set(self.held[i]) & set(self.held[other])
                queue = next(self.queues[q] for q in sorted(both) if self._is_given[q])
                why, is_deadlock = f"is listed on {queue!r} behind", True
            lines.append(f"{self.operations[i].name!r} {why} {self.operations[other].name!r}")
        if len(lines) > _MAX_NAMED:
            lines[_MAX_NAMED:] = [f"and {len(lines) - _MAX_NAMED} more back to the first"]
        if is_deadlock:
            return (
                f"deadlock between queue order and dependencies: {', '.join(lines)}; list them in "
                "an order that the dependencies allow, or let the queue go by readiness"
            )
        return f"operations depend on one another in a cycle: {', '.join(lines)}; drop one of these"


def _repeated(operations: Sequence[Operation], index: dict[Hashable, int]) -> str:
    first, operation = next(
        (i, operation) for i, operation in enumerate(operations) if index[operation.name] != i
    )
    return (
        f"two operations are called {operation.name!r}, numbers {first} and "
        f"{index[operation.name]}; give each a name of its own"
    )
