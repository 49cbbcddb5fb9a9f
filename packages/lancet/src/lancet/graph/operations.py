"""The operations of a training graph in launch order, on a compute and a communication queue.

After the two devices of Lancet's schedule simulator (arXiv 2404.19429). An operation starts when its
queue is free and all that it follows have ended. Waiting for a communication is no operation: what
reads the result follows the communication.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from math import isfinite
from typing import Literal, NamedTuple, get_args

from shared.errors import DataError

__all__ = ["COMMUNICATION", "COMPUTE", "Kind", "LaunchOrder", "Op", "OpGraph", "name_group"]

Kind = Literal["compute", "all_to_all", "all_reduce"]
"""Compute operations run on the compute queue, the two collectives on the communication queue."""

COMPUTE, COMMUNICATION = "compute", "communication"


@dataclass(frozen=True, slots=True)
class Op:
    """One operation of a training graph.

    Attributes:
        name: unique in its graph.
        kind: "compute", "all_to_all" or "all_reduce".
        time_s: seconds for which it holds its queue.
        after: names of the operations that must have ended before it starts.

    Raises:
        DataError: the kind is unknown, the time is negative or not finite, or `after` is a text.
    """

    name: str
    kind: Kind
    time_s: float
    after: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise DataError(
                f"operation {self.name!r}: expected a kind of {', '.join(get_args(Kind))}, got "
                f"{self.kind!r}; choose one of them"
            )
        if not (isfinite(self.time_s) and self.time_s >= 0):
            raise DataError(
                f"operation {self.name!r}: expected a finite time of 0 s or more, got "
                f"{self.time_s} s; measure it again"
            )
        if isinstance(self.after, str):
            raise DataError(
                f"operation {self.name!r}: expected names in after, got the text {self.after!r}; "
                f"write ({self.after!r},)"
            )
        object.__setattr__(self, "after", tuple(dict.fromkeys(self.after)))

    @property
    def queue(self) -> str:
        """Name of the queue on which it runs."""
        return COMPUTE if self.kind == "compute" else COMMUNICATION


class LaunchOrder(NamedTuple):
    """In which order a graph's operations are launched.

    Attributes:
        names: of all operations.
        groups: names of all-reduces that run as one, groups and names in launch order. It is launched
            in the turn of its last one; no other collective comes between them.
    """

    names: tuple[str, ...]
    groups: tuple[tuple[str, ...], ...] = ()


def name_group(group: Sequence[str]) -> str:
    """What a group of all-reduces is called where it runs as one."""
    return f"{group[0]} and {len(group) - 1} more"


class OpGraph:
    """Operations numbered in launch order.

    Args:
        ops: operations; each is listed after those that it follows.

    Attributes:
        ops: as given.
        index: an operation's number by its name.
        needs: by number, the numbers of the operations that it follows.
        followers: by number, the numbers of the operations that follow it.
        time_s: seconds by number.
        compute: numbers of the compute operations.
        communications: numbers of the all-to-alls and all-reduces.

    Raises:
        DataError: two operations share a name, or one follows an operation that is unknown, that is
            listed later, or that waits for it in a cycle.
    """

    def __init__(self, ops: Iterable[Op]) -> None:
        self.ops = tuple(ops)
        self.index = {op.name: i for i, op in enumerate(self.ops)}
        for i, op in enumerate(self.ops):
            if self.index[op.name] != i:
                raise DataError(
                    f"two operations are called {op.name!r}, numbers {i} and "
                    f"{self.index[op.name]}; give each its own name"
                )
            for name in op.after:
                if name not in self.index:
                    raise DataError(
                        f"operation {op.name!r} follows the unknown operation {name!r}; list that "
                        "one too"
                    )
        self.needs = [[self.index[name] for name in op.after] for op in self.ops]
        for i, needed in enumerate(self.needs):
            if needed and max(needed) >= i:
                self._refuse_order(i, max(needed))
        self.followers: list[list[int]] = [[] for _ in self.ops]
        for i, needed in enumerate(self.needs):
            for other in needed:
                self.followers[other].append(i)
        self.time_s = [float(op.time_s) for op in self.ops]
        self.compute = [i for i, op in enumerate(self.ops) if op.kind == "compute"]
        self.communications = [i for i, op in enumerate(self.ops) if op.kind != "compute"]

    def names(self, numbers: Iterable[int]) -> tuple[str, ...]:
        """Names of operations by their numbers."""
        return tuple(self.ops[i].name for i in numbers)

    def _refuse_order(self, i: int, late: int) -> None:
        """Names the cycle of the graph, or the operation that should be listed before number i."""
        try:
            TopologicalSorter({op.name: op.after for op in self.ops}).prepare()
        except CycleError as error:
            cycle = " before ".join(map(repr, error.args[1]))
            raise DataError(f"operations wait for one another: {cycle}; break the cycle") from None
        raise DataError(
            f"operation {self.ops[i].name!r} follows {self.ops[late].name!r}, which is listed after "
            "it; list operations in launch order"
        )
