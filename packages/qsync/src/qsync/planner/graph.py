"""The operators of a model as a directed acyclic graph: which of them read the output of which."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, get_args

from shared.errors import DataError

__all__ = ["Graph", "Kind", "Op"]

Kind = Literal["linear", "dependent", "fixed"]
"""A linear operator may be lowered, a dependent one follows its inputs, a fixed one stays float32."""


@dataclass(frozen=True, slots=True)
class Op:
    """One operator.

    Attributes:
        name: unique in its graph.
        kind: "linear", "dependent" or "fixed".
        inputs: names of the operators whose outputs it reads. The graph's own inputs have no name:
            an operator that reads nothing else has none.
        numel: elements of its output.
        weight_numel: elements of its weight, 0 without one.

    Raises:
        DataError: the kind is unknown, or a count is negative.
    """

    name: str
    kind: Kind
    inputs: tuple[str, ...] = ()
    numel: int = 0
    weight_numel: int = 0

    def __post_init__(self) -> None:
        # An operator that reads one output twice casts it once.
        object.__setattr__(self, "inputs", tuple(dict.fromkeys(self.inputs)))
        if self.kind not in get_args(Kind):
            raise DataError(
                f"operator {self.name!r}: expected a kind of {', '.join(get_args(Kind))}, got "
                f"{self.kind!r}; choose one of them"
            )
        for key in ("numel", "weight_numel"):
            if getattr(self, key) < 0:
                raise DataError(
                    f"operator {self.name!r}: expected {key} of 0 or more, got "
                    f"{getattr(self, key)}; count the elements of its tensor"
                )


class Graph:
    """Operators in the order in which a forward pass runs them.

    Args:
        ops: operators; each comes after those that it reads.

    Attributes:
        ops: as given.
        index: an operator's position by its name.
        inputs: by position, the positions of the operators that it reads.
        consumers: by position, the positions of the operators that read it.
        linears: positions of the operators that may be lowered.

    Raises:
        DataError: two operators share a name, or one reads an operator that is unknown, that runs
            later, or that waits for it in a cycle.
    """

    def __init__(self, ops: Iterable[Op]) -> None:
        self.ops = tuple(ops)
        self.index = {op.name: i for i, op in enumerate(self.ops)}
        for i, op in enumerate(self.ops):
            if self.index[op.name] != i:
                raise DataError(
                    f"two operators are called {op.name!r}, numbers {i} and "
                    f"{self.index[op.name]}; give each its own name"
                )
            for source in op.inputs:
                if source not in self.index:
                    raise DataError(
                        f"operator {op.name!r} reads the unknown operator {source!r}; list that one "
                        "too, or leave out the graph's own inputs"
                    )
        self.inputs = [[self.index[source] for source in op.inputs] for op in self.ops]
        for i, sources in enumerate(self.inputs):
            if sources and max(sources) >= i:
                self._refuse_order(i)
        self.consumers: list[list[int]] = [[] for _ in self.ops]
        for i, sources in enumerate(self.inputs):
            for source in sources:
                self.consumers[source].append(i)
        self.linears = [i for i, op in enumerate(self.ops) if op.kind == "linear"]

    def position(self, name: str) -> int:
        """Returns an operator's position.

        Raises:
            DataError: the name is unknown.
        """
        if name not in self.index:
            raise DataError(f"expected an operator of the graph, got {name!r}; check the name")
        return self.index[name]

    def _refuse_order(self, i: int) -> None:
        """Names the cycle that operator i is on, or the operator that should come before it."""
        name = self.ops[i].name
        paths = [[i, source] for source in self.inputs[i]]
        visited: set[int] = set()
        while paths:
            path = paths.pop()
            if path[-1] == i:
                cycle = " reads ".join(repr(self.ops[j].name) for j in path)
                raise DataError(
                    f"operators read one another in a cycle: {cycle}; drop one of these"
                )
            if path[-1] not in visited:
                visited.add(path[-1])
                paths += [[*path, source] for source in self.inputs[path[-1]]]
        late = self.ops[max(self.inputs[i])].name
        raise DataError(
            f"operator {name!r} reads {late!r}, which is listed after it; list operators in the "
            "order in which they run"
        )
