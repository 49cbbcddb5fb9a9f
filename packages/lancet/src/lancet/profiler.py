"""Runs a graph once, node by node: seconds of each operator, and which tensors it makes and reads.

Also times a traced model's nodes on parts of the batch, as Lancet (arXiv 2404.19429) does for operators
that it cuts.
"""

from __future__ import annotations

import time
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.distributed.tensor import DTensor

from lancet.graph.batch_axes import BatchAxes
from lancet.graph.operations import Kind
from lancet.planner.memory import KeptTensor
from lancet.planner.partition import PartCosts
from shared.comms import Group, barrier, start_exchange

__all__ = ["GraphProfile", "profile", "time_parts"]

_EXCHANGE = torch.ops._c10d_functional.all_to_all_single
_WAIT = torch.ops._c10d_functional.wait_tensor
_NUM_TIMINGS = 2


@dataclass(frozen=True, slots=True)
class GraphProfile:
    """What a run of a graph has shown.

    Attributes:
        time_s: seconds by node; a collective's from its start on all ranks to its end on this one, with
            nothing beside it.
        tensors: memory that the graph's inputs and operators allocate.
    """

    time_s: dict[str, float]
    tensors: list[KeptTensor]


def profile(
    module: fx.GraphModule, arguments: list[Any], group: Group, starts: Container[str]
) -> tuple[Any, GraphProfile]:
    """Runs a graph and observes its nodes; all ranks of the group call this.

    Args:
        module: the graph, in which starts of collectives return what has a `wait`.
        arguments: its inputs; the list is emptied.
        group: ranks that run the graph.
        starts: names of the nodes that start its collectives.

    Returns:
        The graph's outputs and the profile.

    Raises:
        CommError: a rank died or the timeout passed.
    """
    observer = _Observer(module, group, starts)
    values = list(arguments)
    arguments.clear()
    with torch.no_grad():
        outputs = observer.run(*values)
    return outputs, GraphProfile(observer.time_s, observer.list_tensors())


def time_parts(
    module: fx.GraphModule,
    axes: BatchAxes | None,
    inputs: Sequence[Any],
    group: Group,
    numbers: Sequence[int],
) -> PartCosts:
    """Times the nodes of a traced model's forward pass, on the whole batch and on its first part.

    Every rank calls this. Random states are left as they were.

    Args:
        module: traced by torch.compile.
        axes: of its graph; None: it has no parts.
        inputs: of the module.
        group: ranks whose all-to-alls are run.
        numbers: numbers of parts to time, 1 among them.

    Raises:
        CommError: a rank died or the timeout passed.
    """
    nodes = list(module.graph.nodes)
    placeholders = [node for node in nodes if node.op == "placeholder"]
    timer = _NodeTimer(module, group)
    by_number: dict[int, dict[fx.Node, float]] = {number: {} for number in numbers}
    # In turns, so that other programs of the machine slow all alike.
    for number in (*numbers,) * _NUM_TIMINGS:
        arguments = [
            _first_part(node, value, axes, number)
            for node, value in zip(placeholders, inputs, strict=True)
        ]
        timer.time_s = by_number[number]
        with torch.random.fork_rng(), torch.no_grad():
            timer.run(*arguments)
    time_s = {
        number: [seconds.get(node, 0.0) for node in nodes] for number, seconds in by_number.items()
    }
    kinds: list[Kind] = ["all_to_all" if timer.is_exchange(node) else "compute" for node in nodes]
    num_bytes = [timer.num_bytes.get(node, 0) for node in nodes]
    s_per_byte = _copy_s_per_byte()
    return PartCosts(kinds, time_s, [size * s_per_byte for size in num_bytes], num_bytes)


def _first_part(node: fx.Node, value: Any, axes: BatchAxes | None, number: int) -> Any:
    if axes is not None and node in axes.sizes:
        return axes.size // number
    if isinstance(value, torch.SymInt):
        return int(value)
    place = None if axes is None else axes.axes.get(node)
    if axes is None or place is None:
        return value
    return value.narrow(place[0], 0, axes.size // number * place[1])


def _copy_s_per_byte() -> float:
    rows = torch.ones(1 << 18)
    start_s = time.perf_counter()
    for _ in range(8):
        torch.cat([rows, rows])
    return (time.perf_counter() - start_s) / (16 * rows.nbytes)


class _NodeTimer(fx.Interpreter):
    """Runs a traced model with `shared.comms`' exchange; an all-to-all is waited for at once.

    Attributes:
        time_s: by node, the least seconds of all runs.
        num_bytes: by node, bytes of the largest result of all runs.
    """

    def __init__(self, module: fx.GraphModule, group: Group) -> None:
        super().__init__(module)
        self._group = group
        self.time_s: dict[fx.Node, float] = {}
        self.num_bytes: dict[fx.Node, int] = {}

    def is_exchange(self, node: fx.Node) -> bool:
        """Whether a node is an all-to-all over the group."""
        packet = getattr(node.target, "overloadpacket", node.target)
        return packet is _EXCHANGE and node.args[-1] == self._group.checked().group_name

    def run_node(self, n: fx.Node) -> Any:
        if self.is_exchange(n):
            barrier(self._group)
        start_s = _now_s()
        if self.is_exchange(n):
            rows, recvs, sends, _ = self.fetch_args_kwargs_from_env(n)[0]
            pending = start_exchange(self._group, rows.contiguous(), sends, recvs, phase=n.name)
            result = pending.wait()
        elif getattr(n.target, "overloadpacket", n.target) is _WAIT:
            (result,) = self.fetch_args_kwargs_from_env(n)[0]
        else:
            result = super().run_node(n)
        elapsed_s = _now_s() - start_s
        self.time_s[n] = min(elapsed_s, self.time_s.get(n, elapsed_s))
        if isinstance(result, Tensor):
            own = result.to_local() if isinstance(result, DTensor) else result
            self.num_bytes[n] = max(own.nbytes, self.num_bytes.get(n, 0))
        return result


class _Observer(fx.Interpreter):
    def __init__(self, module: fx.GraphModule, group: Group, starts: Container[str]) -> None:
        super().__init__(module)
        self._group, self._starts = group, starts
        self.time_s: dict[str, float] = {}
        self._tensors: list[KeptTensor] = []
        self._readers: list[list[str]] = []
        # By node, the memory that its result lies in: number of the tensor by its address.
        self._memory: dict[fx.Node, dict[int, int]] = {}

    def run_node(self, n: fx.Node) -> Any:
        if n.op == "output":
            for number in self._read(n).values():
                self._tensors[number] = replace(self._tensors[number], is_kept=True)
            return super().run_node(n)
        if n.name in self._starts:
            # A rank that comes late finds the others' rows received, and would wait too short a time.
            barrier(self._group)
        start_s = _now_s()
        result = super().run_node(n)
        value = result
        if _is_pending(result):
            value = result[-1].wait()
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
        if is_op and not any(other.name in self._starts for other in n.all_input_nodes):
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
