"""The graph of a model's operators: traced by FX, or a chain of modules where tracing fails.

Lowered operators return their results in float32, so that whatever is no linear operator is fixed.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.fx.passes.shape_prop import ShapeProp

from qsync.planner.graph import Graph, Op
from qsync.profiler.gradients import LossFunction
from qsync.profiler.state import preserve_state
from qsync.profiler.step_timing import END, watch_operators
from qsync.runtime.modules import list_operators
from shared.errors import DataError

__all__ = ["TracedModel", "gap_name", "trace_model"]


class TracedModel(NamedTuple):
    """A graph, the operators in the order in which they run, and why FX failed, if it did.

    Before each operator, and at the end, the graph has an operator that stands for the time between
    two operators (`gap_name`). It reads nothing and is read by nothing.
    """

    graph: Graph
    names: tuple[str, ...]
    reason: str


def gap_name(name: str) -> str:
    """Returns the graph's name of the time before an operator, or of that after the last one."""
    return f"before {name}" if name else "loss"


def trace_model(model: nn.Module, batch: Any, loss_fn: LossFunction) -> TracedModel:
    """Finds the operators that a step runs and which of them reads whose output.

    Args:
        model: model; it is left as it was.
        batch: a training batch.
        loss_fn: returns the loss of (model, batch).

    Raises:
        DataError: no operator ran.
    """
    calls, numel, arguments = _run(model, batch, loss_fn)
    names = tuple(dict.fromkeys(calls))
    if not names:
        raise DataError(
            "loss_fn: expected a call of the model's operators, got none; return the loss of "
            "loss_fn(model, batch)"
        )
    reason = ""
    ops: list[Op] = []
    try:
        if len(arguments) != 1:
            raise ValueError(f"the loss calls the model {len(arguments)} times")
        ops = _trace(model, *arguments[0])
        traced = [op.name for op in ops if op.kind == "linear"]
        if not traced == calls == list(names):
            raise ValueError("a step runs other operators than FX finds, or one of them twice")
    except Exception as error:  # noqa: BLE001 - a model's code may raise anything on proxies
        reason = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        ops = _chain(model, names, numel)
    return TracedModel(Graph(_insert_gaps(_separate(ops))), names, reason)


def _run(
    model: nn.Module, batch: Any, loss_fn: LossFunction
) -> tuple[list[str], dict[str, int], list[tuple[Any, Any]]]:
    """Operators in the order of their calls, elements that each writes, model's arguments."""
    calls: list[str] = []
    numel: dict[str, int] = {}
    arguments: list[tuple[Any, Any]] = []

    def note(name: str, _: tuple[Any, ...], output: Any) -> None:
        calls.append(name)
        numel[name] = output.numel()

    handle = model.register_forward_pre_hook(
        lambda _, args, kwargs: arguments.append((args, kwargs)), with_kwargs=True
    )
    try:
        with preserve_state(model), watch_operators(model, lambda *_: None, note), torch.no_grad():
            loss_fn(model, batch)
    finally:
        handle.remove()
    return calls, numel, arguments


class _Tracer(fx.Tracer):
    def __init__(self, leaves: Sequence[nn.Module]) -> None:
        super().__init__()
        self._leaves = {id(module) for module in leaves}

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return id(m) in self._leaves or super().is_leaf_module(m, module_qualified_name)


def _trace(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Op]:
    operators = list_operators(model)
    bound = inspect.signature(model.forward).bind(*args, **kwargs)
    bound.apply_defaults()
    constants = {
        name: value for name, value in bound.arguments.items() if not isinstance(value, Tensor)
    }
    traced = _Tracer(list(operators.values())).trace(model, concrete_args=constants or None)
    module = fx.GraphModule(model, traced)
    with preserve_state(model), torch.no_grad():
        ShapeProp(module).propagate(*bound.arguments.values())
    by_module = {id(each): name for name, each in operators.items()}
    ops: list[Op] = []
    # A node that holds no tensor, such as a size, has no operator, and the inputs do not either.
    names: dict[fx.Node, str] = {}
    for node in traced.nodes:
        numel = _count_elements(node.meta.get("tensor_meta"))
        if node.op not in ("call_module", "call_function", "call_method") or not numel:
            continue
        target = model.get_submodule(node.target) if node.op == "call_module" else node.target
        name = by_module.get(id(target), f"{node.name} ({node.op.removeprefix('call_')})")
        names[node] = name
        ops.append(
            Op(
                name,
                "linear" if id(target) in by_module else "fixed",
                tuple(names[each] for each in node.all_input_nodes if each in names),
                numel,
                _count_weight(target) if id(target) in by_module else 0,
            )
        )
    return ops


def _count_elements(meta: Any) -> int:
    if isinstance(meta, tuple | list) and not hasattr(meta, "shape"):
        return sum(_count_elements(each) for each in meta)
    return meta.shape.numel() if hasattr(meta, "shape") else 0


def _count_weight(module: Any) -> int:
    """Elements of the weight that a lowered operator casts; a lookup casts the rows that it reads."""
    is_cast = hasattr(module, "weight") and not isinstance(module, nn.Embedding)
    return module.weight.numel() if is_cast else 0


def _chain(model: nn.Module, names: Sequence[str], numel: dict[str, int]) -> list[Op]:
    """Operators one after another, as if each read the one before."""
    operators = list_operators(model)
    ops: list[Op] = []
    for name in names:
        sources = (ops[-1].name,) if ops else ()
        ops.append(Op(name, "linear", sources, numel[name], _count_weight(operators[name])))
    return ops


def _separate(ops: Sequence[Op]) -> list[Op]:
    """Puts a float32 tensor between operators that read one another: their results are cast back."""
    is_linear = {op.name: op.kind == "linear" for op in ops}
    separated: list[Op] = []
    for op in ops:
        inputs = op.inputs
        if op.kind == "linear":
            inputs = tuple(f"output of {name}" if is_linear[name] else name for name in inputs)
        separated.append(replace(op, inputs=inputs))
        if op.kind == "linear":
            separated.append(Op(f"output of {op.name}", "fixed", (op.name,), op.numel))
    read = {name for op in separated for name in op.inputs}
    return [op for op in separated if op.name in is_linear or op.name in read]


def _insert_gaps(ops: Sequence[Op]) -> list[Op]:
    with_gaps: list[Op] = []
    for op in ops:
        if op.kind == "linear":
            with_gaps.append(Op(gap_name(op.name), "fixed"))
        with_gaps.append(op)
    return [*with_gaps, Op(gap_name(END), "fixed")]
