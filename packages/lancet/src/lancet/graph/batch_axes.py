"""Where the batch lies in a model's graph, and which of its operators may run on a part of it.

After the axis inference of Lancet (arXiv 2404.19429), which solves constraints over all tensors. Here the
graph runs once on tensors without data, its batch replaced by a number that occurs nowhere else: an axis
of that size, or of a multiple, is the batch's. An operator may be cut if `lancet.graph.axes` has a rule
that cuts its arguments and its result along these axes. What happens between the two marks of
`lancet.moe.dispatch` keeps rows apart, in whatever order they are.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lancet.graph.axes import allowed
from lancet.moe.dispatch import mark_end, mark_start
from shared.errors import ConfigError

__all__ = [
    "BatchAxes",
    "drop_unused_sizes",
    "find_batch_axes",
    "fix_sizes",
    "list_exchanges",
    "mark_sizes",
]

# Stands for the size of the batch: a prime that no other size is a multiple of.
_PRIME = 1_000_003
# Attributes of a tensor in which torch notes that axes are to be symbols, and which.
_MARKS = ("_has_dynamo_dim_marking", "_dynamo_weak_dynamic_indices")


@dataclass(frozen=True, slots=True, eq=False)
class BatchAxes:
    """Where the batch lies in a graph of torch's functions.

    Attributes:
        size: sequences of the batch.
        sizes: inputs of the graph that hold this number.
        axes: by node with a tensor, the axis of the batch and how many of the axis' elements belong to
            a sequence; None for a tensor without such an axis.
        dependent: nodes whose values depend on the batch.
        whole: by node that must run on the whole batch, the operator that has no rule for a part.
        writers: nodes that write to an argument.
    """

    size: int
    sizes: frozenset[fx.Node]
    axes: dict[fx.Node, tuple[int, int] | None]
    dependent: frozenset[fx.Node]
    whole: dict[fx.Node, str]
    writers: frozenset[fx.Node]


def find_batch_axes(module: fx.GraphModule, inputs: Sequence[Any]) -> BatchAxes | None:
    """Finds the batch in a graph that torch.compile has traced with sizes as symbols.

    The batch is the first axis of the first input with two axes or more, of which that is a symbol.

    Args:
        module: of Dynamo.
        inputs: its example inputs.

    Returns:
        None if no input has such an axis, as with a batch of one sequence.

    Raises:
        ConfigError: the model cannot run without data, or it writes to its inputs or buffers.
    """
    placeholders = module.graph.find_nodes(op="placeholder")
    size = next(
        (symbol for node in placeholders if (symbol := _first_size(node)) is not None), None
    )
    if size is None:
        return None
    values = [_example(node) for node in placeholders]
    sizes = frozenset(
        node
        for node, value in zip(placeholders, values, strict=True)
        if isinstance(value, torch.SymInt) and _is_same(value, size)
    )
    reader = _Reader(module)
    mode = FakeTensorMode(shape_env=ShapeEnv())
    with mode, torch.no_grad():
        arguments = [
            _stand_in(mode, node in sizes, value, real, size)
            for node, value, real in zip(placeholders, values, inputs, strict=True)
        ]
        try:
            reader.run(*arguments)
        except RuntimeError as error:
            raise ConfigError(
                f"expected a model that runs on tensors without data, got {str(error).splitlines()[0]}"
            ) from error
    if reader.writes_inputs:
        raise ConfigError(
            f"expected a model that writes to none of its inputs and buffers, got "
            f"{reader.writes_inputs[0]}, which does"
        )
    dependent: set[fx.Node] = set()
    for node in module.graph.nodes:
        if node in sizes or reader.axes.get(node) or dependent.intersection(node.all_input_nodes):
            dependent.add(node)
    return BatchAxes(
        int(size), sizes, reader.axes, frozenset(dependent), reader.whole, frozenset(reader.writers)
    )


@contextlib.contextmanager
def mark_sizes(inputs: Iterable[Any]) -> Iterator[None]:
    """Lets torch.compile trace sizes that may be the batch's as symbols; others stay numbers.

    These are the first sizes of inputs, and equal ones. Parameters and buffers keep theirs in any case.
    """
    tensors = [
        value
        for value in inputs
        if isinstance(value, Tensor)
        and not isinstance(value, (nn.Parameter, DTensor))
        and value.dim()
        and not hasattr(value, _MARKS[0])
    ]
    sizes = {tensor.shape[0] for tensor in tensors}
    for tensor in tensors:
        for axis, length in enumerate(tensor.shape):
            if length in sizes:
                torch._dynamo.maybe_mark_dynamic(tensor, axis)
    try:
        yield
    finally:
        for tensor in tensors:
            for name in _MARKS:
                vars(tensor).pop(name, None)


def drop_unused_sizes(module: fx.GraphModule, inputs: Sequence[Any]) -> list[Any]:
    """Removes symbols of sizes that nothing reads from a traced graph's inputs; returns the others.

    torch.compile passes the inputs that the graph has when its backend returns.
    """
    left = []
    placeholders = module.graph.find_nodes(op="placeholder")
    for node, value in zip(placeholders, inputs, strict=True):
        if isinstance(_example(node), torch.SymInt) and not node.users:
            module.graph.erase_node(node)
        else:
            left.append(value)
    module.recompile()
    return left


def fix_sizes(module: fx.GraphModule) -> None:
    """Makes the symbols of a traced graph's sizes the numbers that its inputs have."""
    for node in module.graph.find_nodes(op="placeholder"):
        if isinstance(_example(node), torch.SymInt):
            int(_example(node))  # which keeps the number for good


def list_exchanges(graph: fx.Graph) -> list[list[fx.Node]]:
    """For each layer of experts, its nodes from one mark to the other, both included."""
    exchanges: list[list[fx.Node]] = []
    is_inside = False
    for node in graph.nodes:
        if node.target is mark_start:
            exchanges.append([])
            is_inside = True
        if is_inside:
            exchanges[-1].append(node)
        if node.target is mark_end:
            is_inside = False
    return exchanges


def _example(node: fx.Node) -> Any:
    return node.meta["example_value"]


def _first_size(node: fx.Node) -> torch.SymInt | None:
    value = _example(node)
    if isinstance(value, Tensor) and value.dim() > 1 and isinstance(value.shape[0], torch.SymInt):
        return value.shape[0]
    return None


def _is_same(one: torch.SymInt, other: torch.SymInt) -> bool:
    environment = one.node.shape_env
    return environment.simplify(one.node.expr) == environment.simplify(other.node.expr)


def _stand_in(
    mode: FakeTensorMode, is_size: bool, value: Any, real: Any, size: torch.SymInt
) -> Any:
    """An argument without data, whose batch has `_PRIME` sequences."""
    if is_size:
        return _PRIME
    if isinstance(value, torch.SymInt):
        return int(value)
    if not isinstance(value, Tensor):
        return real
    if not any(isinstance(length, torch.SymInt) for length in value.shape):
        return mode.from_tensor(real, static_shapes=True)
    shape = [
        _PRIME if isinstance(length, torch.SymInt) and _is_same(length, size) else int(length)
        for length in value.shape
    ]
    return torch.empty(shape, dtype=value.dtype, device=value.device)


class _Reader(fx.Interpreter):
    """Runs the graph on tensors without data and judges each node."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.axes: dict[fx.Node, tuple[int, int] | None] = {}
        self.whole: dict[fx.Node, str] = {}
        self.writers: set[fx.Node] = set()
        self.writes_inputs: list[str] = []
        self._memory: set[int] = set()
        self._inside = {node for nodes in list_exchanges(module.graph) for node in nodes}

    def run_node(self, n: fx.Node) -> Any:
        if n in self._inside:
            result = super().run_node(n)
        else:
            with _Judge(self._memory) as judge:
                result = super().run_node(n)
            if judge.refused:
                self.whole[n] = judge.refused[0]
            if judge.writes:
                self.writers.add(n)
            self.writes_inputs += judge.writes_inputs
        if n.op == "placeholder" and isinstance(result, Tensor) and not isinstance(result, DTensor):
            self._memory.add(result.untyped_storage()._cdata)
        if isinstance(result, Tensor):
            axis = _batch_axis(result)
            self.axes[n] = None if axis is None else (axis, result.shape[axis] // _PRIME)
        return result


class _Judge(TorchDispatchMode):
    """Notes the operators that run and may not run on a part of the batch."""

    def __init__(self, inputs: set[int]) -> None:
        super().__init__()
        self._inputs = inputs
        self.refused: list[str] = []
        self.writes = False
        self.writes_inputs: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func.namespace == "prim":  # asks for a tensor's device or layout
            return result
        if func._schema.is_mutable:
            self.writes = True
            if args[0].untyped_storage()._cdata in self._inputs:
                self.writes_inputs.append(str(func))
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        own = tuple(_batch_axis(tensor) for tensor in tensors)
        out = _batch_axis(outputs[0]) if outputs else None
        if (any(axis is not None for axis in own) or out is not None) and (
            (own, out) not in allowed(func, *args, **kwargs)
        ):
            self.refused.append(str(func))
        return result


def _batch_axis(tensor: Tensor) -> int | None:
    """The one axis whose size is a multiple of the batch's stand-in."""
    axes = [
        axis
        for axis, length in enumerate(tensor.shape)
        if isinstance(length, int) and length and length % _PRIME == 0
    ]
    return axes[0] if len(axes) == 1 else None
