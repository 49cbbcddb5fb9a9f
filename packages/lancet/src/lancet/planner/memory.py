"""Bytes alive while operations run in a launch order.

Lancet's published pass (arXiv 2404.19429) has no limit: an operation that is launched later keeps its
inputs alive for longer. A tensor lives from the launch of its maker to the end of its last reader. A
communication reads until its result is waited for, by the first operation that follows it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int64

from lancet.graph.operations import OpGraph
from shared.errors import DataError

__all__ = ["KeptTensor", "LiveBytes", "LiveCount"]


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptTensor:
    """A tensor of a graph.

    Attributes:
        num_bytes: its bytes.
        maker: name of the operation that allocates it; None if it is there before the first one.
        readers: names of the operations that read it, views of it included.
        is_kept: whether it outlives the graph, as a gradient does.
    """

    num_bytes: int
    maker: str | None = None
    readers: tuple[str, ...] = ()
    is_kept: bool = False

    def __post_init__(self) -> None:
        if self.num_bytes < 0:
            raise DataError(
                f"tensor of operation {self.maker!r}: expected 0 bytes or more, got "
                f"{self.num_bytes}; count them again"
            )


class LiveBytes:
    """Counts the bytes that are alive in any launch order of a graph.

    Args:
        graph: the operations.
        tensors: what they allocate and read.

    Attributes:
        graph: the operations.
        num_bytes: by tensor.
        made: by operation, numbers of the tensors that it allocates.
        read: by operation, numbers of the tensors that it reads.
        num_readers: by tensor; one more if it outlives the graph.
        initial: numbers of the tensors that are there before the first operation.

    Raises:
        DataError: a tensor names an unknown operation, or two different operations allocate one.
    """

    def __init__(self, graph: OpGraph, tensors: Iterable[KeptTensor]) -> None:
        self.graph = graph
        self.num_bytes: list[int] = []
        self.num_readers: list[int] = []
        self.initial: list[int] = []
        self.made: list[list[int]] = [[] for _ in graph.ops]
        self.read: list[list[int]] = [[] for _ in graph.ops]
        for number, tensor in enumerate(tensors):
            # Its maker holds a tensor that nobody reads while it runs.
            users = (*(() if tensor.maker is None else (tensor.maker,)), *tensor.readers)
            for name in users:
                if name not in graph.index:
                    raise DataError(
                        f"tensor {number}: expected operations of the graph, got {name!r}; check "
                        "its maker and readers"
                    )
            readers = sorted({graph.index[name] for name in users})
            self.num_bytes.append(tensor.num_bytes)
            self.num_readers.append(len(readers) + tensor.is_kept)
            if tensor.maker is None:
                self.initial.append(number)
            else:
                self.made[graph.index[tensor.maker]].append(number)
            for reader in readers:
                self.read[reader].append(number)

    def list_bytes(self, order: Sequence[int]) -> Int64[np.ndarray, " ops"]:
        """Bytes alive while each operation runs, by its position in the order."""
        count = LiveCount(self)
        return np.array([count.launch(i) for i in order], dtype=np.int64)

    def peak_bytes(self, order: Sequence[int]) -> int:
        """Most bytes alive while any operation runs."""
        return int(self.list_bytes(order).max(initial=0))


class LiveCount:
    """The bytes alive while operations are launched one after another.

    Args:
        memory: the tensors.
    """

    def __init__(self, memory: LiveBytes) -> None:
        self._memory = memory
        self._num_readers = list(memory.num_readers)
        self._num_bytes = sum(
            memory.num_bytes[tensor] for tensor in memory.initial if memory.num_readers[tensor]
        )
        self._is_awaited = [False] * len(memory.graph.ops)

    def bytes_during(self, i: int) -> int:
        """Bytes alive while operation `i` runs, if it is launched next."""
        made = self._memory.made[i]
        return self._num_bytes + sum(self._memory.num_bytes[tensor] for tensor in made)

    def launch(self, i: int) -> int:
        """Launches operation `i`; returns the bytes alive while it runs."""
        during = self._num_bytes = self.bytes_during(i)
        graph = self._memory.graph
        for other in graph.needs[i]:
            if graph.ops[other].kind != "compute" and not self._is_awaited[other]:
                self._is_awaited[other] = True
                self._release(other)
        if graph.ops[i].kind == "compute":
            self._release(i)
        return during

    def _release(self, i: int) -> None:
        for tensor in self._memory.read[i]:
            self._num_readers[tensor] -= 1
            if not self._num_readers[tensor]:
                self._num_bytes -= self._memory.num_bytes[tensor]
