"""One call on a group: what each rank is sent, and how the ranks' results are joined.

Rows are split by reference: each rank receives the handles and row ranges of its share, and reads
the rows from the rank that made them. Rows that do not divide evenly are padded with marked rows,
which count in no loss and are dropped from the results.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from hybridflow.workers.batch.batch import Batch
from hybridflow.workers.engines.rank import (
    Gather,
    RankTask,
    Reply,
    Segment,
    Slot,
    ValueStore,
    read_value,
)
from hybridflow.workers.future import Future, Joined, ResultPart
from hybridflow.workers.protocols import Protocol, Share
from shared.errors import DataError, RankFailure

__all__ = ["Call", "MethodRoute"]


@dataclass(frozen=True, kw_only=True)
class MethodRoute:
    """Which ranks run a method and which return results; computed once, used by every call.

    Attributes:
        target, method: names of the group ("" for the executors themselves) and of its method.
        ranks: the group's ranks in the world, by rank in the group.
        protocol: how arguments and results travel.
        shares: by rank in the group, the share of a batch's rows it gets.
        collectors: ranks in the group whose results are joined.
    """

    target: str
    method: str
    ranks: Sequence[int]
    protocol: Protocol
    shares: Sequence[Share]
    collectors: Sequence[int]

    @cached_property
    def name(self) -> str:
        """Name of group and method, for messages."""
        return f"{self.target or 'workers'}.{self.method}"

    @cached_property
    def places(self) -> Sequence[int]:
        """Ranks in the group that run the method."""
        is_partial = self.protocol.runs_on == "collectors"
        return self.collectors if is_partial else range(len(self.ranks))

    @cached_property
    def asked(self) -> tuple[int, ...]:
        """Ranks in the world that run the method, in the order of `places`."""
        return tuple(self.ranks[k] for k in self.places)


@dataclass(eq=False, slots=True, kw_only=True)
class Call:
    """A call and its state.

    Attributes:
        number: unique among a controller's calls.
        route: the ranks that run it.
        args, kwargs: the arguments; released once all ranks have answered.
        future: receives the result.
        replies: replies so far, by rank in the world.
        failed_at: monotonic time of the first failure, None before.
        sent: handles that the ranks read from, kept until they have answered.
    """

    number: int
    route: MethodRoute
    args: tuple
    kwargs: dict[str, Any]
    future: Future
    replies: dict[int, Reply] = field(default_factory=dict)
    failed_at: float | None = None
    sent: list[Any] = field(default_factory=list)

    def inputs(self) -> list[Future]:
        """Futures among the arguments."""
        values = (*self.args, *self.kwargs.values())
        joined = [source for v in values if isinstance(v, Joined) for source, _ in v.operands]
        return [value for value in (*values, *joined) if isinstance(value, Future)]

    def tasks(self, store: ValueStore) -> list[tuple[int, RankTask]]:
        """The task of each rank that runs the method, by rank in the world; inputs must be done.

        Raises:
            DataError: if arguments do not fit the protocol.
        """
        route = self.route
        if not self.args and not self.kwargs:
            task = RankTask(self.number, route.target, route.method)
            return [(rank, task) for rank in route.asked]
        own: list[tuple[Any, ...]] = [()] * len(route.places)

        def slot(value: Any) -> Any:
            nonlocal own
            each = self._by_place(value, store)
            if each is None:
                return value
            own = [(*mine, item) for mine, item in zip(own, each, strict=True)]
            return Slot(len(own[0]) - 1)

        args = tuple(map(slot, self.args))
        kwargs = {key: slot(value) for key, value in self.kwargs.items()}
        common = store.pack((args, kwargs))
        self.sent.append(common)
        return [
            (rank, RankTask(self.number, route.target, route.method, common, mine))
            for rank, mine in zip(route.asked, own, strict=True)
        ]

    def _by_place(self, value: Any, store: ValueStore) -> list[Any] | None:
        """An argument as each running rank gets it; None if all ranks get the same value."""
        route = self.route
        if route.protocol.own_arguments:
            if not isinstance(value, Sequence) or len(value) != len(route.ranks):
                length = f" of length {len(value)}" if isinstance(value, Sequence) else ""
                raise DataError(
                    f"{route.name}: protocol {route.protocol.name!r} takes sequences with one "
                    f"entry for each of {len(route.ranks)} ranks, "
                    f"got a {type(value).__name__}{length}"
                )
            handles = [store.pack(value[k]) for k in route.places]
            self.sent += handles
            return [Segment(handle) for handle in handles]
        if isinstance(value, Batch | Joined) or (isinstance(value, Future) and value.has_rows):
            gathers = self._gathers(value, store)
            return [gathers[k] for k in route.places]
        if isinstance(value, Future):
            segments = [Segment(part.handle) for part in value.parts]
            return [segments if value.is_list else segments[0]] * len(route.places)
        return None

    def _gathers(self, value: Batch | Joined | Future, store: ValueStore) -> list[Gather]:
        """By rank of the group, where its rows of a batch lie, on one rank or several."""
        operands = value.operands if isinstance(value, Joined) else [(value, None)]
        sources = [(self._parts(source, store), columns) for source, columns in operands]
        totals = [sum(part.num_rows or 0 for part in parts) for parts, _ in sources]
        total = totals[0]
        if not total or len(set(totals)) > 1:
            raise DataError(
                f"{self.route.name}: expected a batch with a row or more, and operands of one "
                f"length where several are joined, got {' and '.join(map(str, totals))} rows"
            )
        window = value.window(total) if isinstance(value, Joined) else range(total)
        if not len(window):
            raise DataError(
                f"{self.route.name}: expected a row or more for each part, got none for this one: "
                f"{total} rows are too few for that many parts; give more rows"
            )
        count = next((share[1] for share in self.route.shares if share is not None), 1)
        size = -(-len(window) // count)

        def rows_of(rows: range) -> Gather:
            is_whole = len(window) == total and len(rows) == total
            segments = [
                [Segment(part.handle) for part in parts]
                if is_whole
                else _segments(parts, rows, window)
                for parts, _ in sources
            ]
            is_padded = rows.stop > len(window)
            return Gather(
                [(found, columns) for found, (_, columns) in zip(segments, sources, strict=True)],
                [row >= len(window) for row in rows] if is_padded else None,
            )

        whole = rows_of(range(len(window)))
        parts = [rows_of(range(k * size, (k + 1) * size)) for k in range(count)]
        return [whole if share is None else parts[share[0]] for share in self.route.shares]

    def _parts(self, source: Batch | Future, store: ValueStore) -> list[ResultPart]:
        if isinstance(source, Batch):
            handle = store.pack(source)
            self.sent.append(handle)
            return [ResultPart(handle, len(source))]
        if not source.has_rows:
            raise DataError(
                f"{self.route.name}: expected the future of a batch, got that of {source.name}, "
                f"which does not return a batch; join only results that have rows"
            )
        self.sent += [part.handle for part in source.parts]
        return source.parts

    def finish(self, store: ValueStore) -> None:
        """Sets the future's result, or its error, from the ranks' replies."""
        future, route = self.future, self.route
        if self.failed_at is not None:
            future.error = self.failure()
        else:
            answer, replies = route.protocol.answer, self.replies
            found = [replies[route.ranks[k]] for k in route.collectors]
            parts = [ResultPart(reply.handle, reply.num_rows) for reply in found]
            is_all_rows = None not in [reply.num_rows for reply in found]
            has_rows = is_all_rows and answer in ("rows", "one")
            future.parts, future.has_rows = parts, has_rows
            future.is_list = not has_rows and answer != "one"
            future.read = lambda: _answer(
                [read_value(part.handle, store) for part in parts], answer, has_rows
            )
        self.args, self.kwargs, self.sent = (), {}, []
        future.is_done = True

    def failure(self) -> RankFailure:
        """The error that joins the exceptions of all ranks that raised."""
        told = [(reply.rank, reply.failure) for reply in self.replies.values() if reply.failure]
        places = {rank: k for k, rank in enumerate(self.route.ranks)}
        # A lost connection is a consequence of another rank's failure, so CommError comes last.
        told.sort(key=lambda item: (item[1].kind == "CommError", item[0]))
        rank, first = told[0]
        lines = [
            f"rank {places[rank]} of {len(places)} raised in {self.route.name}: {first.kind}: "
            + f"{first.message}\n\n{first.trace}"
        ]
        lines += [f"rank {places[r]} too: {other.kind}: {other.message}" for r, other in told[1:]]
        return RankFailure("\n".join(lines), rank=rank, mistake=first.mistake)


def _segments(parts: Sequence[ResultPart], rows: range, window: range) -> list[Segment]:
    """Where some rows of a window lie; indices past its last row wrap to its first."""
    found: list[Segment] = []
    row = rows.start
    while row < rows.stop:
        start = window[row % len(window)]
        left = min(rows.stop - row, window.stop - start)
        first = 0
        for part in parts:
            count = part.num_rows or 0
            if first <= start < first + count:
                taken = min(first + count - start, left)
                found.append(Segment(part.handle, start - first, start - first + taken))
                row += taken
                break
            first += count
    return found


def _answer(values: list[Any], answer: Any, has_rows: bool) -> Any:
    if callable(answer):
        return answer(values)
    if answer == "one":
        return values[0]
    if has_rows:
        return Batch.concat([value for value in values if len(value)] or values[:1])
    # A method that returns None has no rows to join.
    if answer == "rows" and all(value is None for value in values):
        return None
    return values
