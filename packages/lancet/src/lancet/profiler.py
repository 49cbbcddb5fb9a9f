"""Runs a graph once, node by node: seconds of each operator, and which tensors it makes and reads."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from lancet.planner.memory import KeptTensor

__all__ = ["GraphProfile", "profile"]


@dataclass(frozen=True, slots=True)
class GraphProfile:
    """What a run of a graph has shown.

    Attributes:
        time_s: seconds by node; a collective's from its start to its end, with nothing beside it.
        tensors: memory that the graph's inputs and operators allocate.
    """

    time_s: dict[str, float]
    tensors: list[KeptTensor]


def profile(module: fx.GraphModule, arguments: list[Any]) -> tuple[Any, GraphProfile]:
    """Runs a graph and observes its nodes.

    Args:
        module: the graph, in which starts of collectives return what has a `wait`.
        arguments: its inputs; the list is emptied.

    Returns:
        The graph's outputs and the profile.

    Raises:
        CommError: a rank died or the timeout passed.
    """
    observer = _Observer(module)
    values = list(arguments)
    arguments.clear()
    with torch.no_grad():
        outputs = observer.run(*values)
    return outputs, GraphProfile(observer.time_s, observer.list_tensors())


class _Observer(fx.Interpreter):
    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.time_s: dict[str, float] = {}
        self._tensors: list[KeptTensor] = []
        self._readers: list[list[str]] = []
        # By node, the memory that its result lies in: number of the tensor by its address.
        self._memory: dict[fx.Node, dict[int, int]] = {}
        self._starts: set[fx.Node] = set()

    def run_node(self, n: fx.Node) -> Any:
        if n.op == "output":
            for number in self._read(n).values():
                self._tensors[number] = replace(self._tensors[number], is_kept=True)
            return super().run_node(n)
        start_s = _now_s()
        result = super().run_node(n)
        value = result
        if _is_pending(result):
            value = result[-1].wait()
            self._starts.add(n)
        self.time_s[n.name] = _now_s() - start_s
        self._record(n, value)
        return result

    def list_tensors(self) -> list[KeptTensor]:
        pairs = zip(self._tensors, self._readers, strict=True)
        return [replace(tensor, readers=tuple(readers)) for tensor, readers in pairs]

    def _read(self, n: fx.Node) -> dict[int, int]:
        """Memory that a node reads."""
        memory: dict[int, int] = {}
        for other in n.all_input_nodes:
            memory |= self._memory[other]
        return memory

    def _record(self, n: fx.Node, value: Any) -> None:
        memory = self._read(n)
        is_op = n.op not in ("placeholder", "get_attr")
        # A wait is no operation: it returns memory of the collective.
        if is_op and not self._starts.intersection(n.all_input_nodes):
            for number in memory.values():
                self._readers[number].append(n.name)
        self._memory[n] = {}
        for tensor in _tensors_of(value):
            storage = tensor.untyped_storage()
            number = memory.get(storage.data_ptr())
            if number is None:
                number = len(self._tensors)
                is_weight = isinstance(tensor, nn.Parameter)
                maker = n.name if is_op else None
                self._tensors.append(
                    KeptTensor(num_bytes=storage.nbytes(), maker=maker, is_kept=is_weight)
                )
                self._readers.append([])
            self._memory[n][storage.data_ptr()] = number


def _is_pending(result: Any) -> bool:
    return isinstance(result, tuple) and bool(result) and hasattr(result[-1], "wait")


def _tensors_of(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from _tensors_of(part)


def _now_s() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()
