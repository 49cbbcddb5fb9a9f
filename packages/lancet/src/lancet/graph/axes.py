"""Along which axes an operator's tensors may be cut so that the parts' results are those of the whole.

After the axis inference of Lancet (arXiv 2404.19429), whose constraints name an axis for every tensor of
an operator. Here the rules are a table of operators (`axis_rules`) and a function for each rule. A cut
is legal if the operator, run on each part and with its sizes changed to the part's, returns that part of
the whole result. An operator without a rule stays whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Any

from lancet.graph.axis_rules import AXIS_RULES

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Cut", "allowed"]

Cut = tuple[tuple[int | None, ...], int]
"""The axis of each tensor argument, None for one that stays whole, and the axis of every output."""


def allowed(op: Any, *args: Any, **kwargs: Any) -> set[Cut]:
    """Lists the cuts of one call of an operator.

    An axis of size 1 is never cut. A reshape of axes that merge or split may be cut where the part is
    a whole number of the larger one's rows.

    Args:
        op: an overload, as `torch.ops.aten.mm.default`.
        args, kwargs: arguments of the call. The operator may be run once for its output's shape; with
            tensors on the meta device it computes nothing.

    Returns:
        The legal cuts: for tensors in the order of the arguments, those of a list one by one. Empty
        if the table has no rule for the operator.
    """
    # An operator that writes to its first argument follows the rule of the one that does not.
    rule = _RULE_BY_OP.get(str(op.overloadpacket).removesuffix("_"))
    return set() if rule is None else set(rule(_Call(op, args, kwargs)))


class _Call:
    """A call of an operator.

    Attributes:
        arguments: all arguments by name, defaults included.
        tensors: tensor arguments in order.
        shapes: their shapes.
        output: shape of the first output.
    """

    def __init__(self, op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        from torch import Tensor

        self._run = lambda: op(*args, **kwargs)
        self.arguments: dict[str, Any] = {}
        self.tensors: list[Tensor] = []
        for number, argument in enumerate(op._schema.arguments):
            value = kwargs.get(argument.name, argument.default_value)
            value = args[number] if number < len(args) else value
            values = value if isinstance(value, (list, tuple)) else [value]
            self.arguments[argument.name] = value
            self.tensors += [each for each in values if isinstance(each, Tensor)]
        self.shapes = [tuple(tensor.shape) for tensor in self.tensors]

    @cached_property
    def output(self) -> tuple[int, ...]:
        """See the class. Some rules do not need it, nor the run of an operator that it takes."""
        from torch import Tensor

        outputs = self._run()
        return tuple((outputs if isinstance(outputs, Tensor) else outputs[0]).shape)

    def dims(self, *names: str) -> set[int]:
        """The axes of the first tensor that an argument names, negative ones counted from the end."""
        rank = len(self.shapes[0])
        named = next((self.arguments[name] for name in names if name in self.arguments), None)
        if named is None:
            return set(range(rank))
        listed = [named] if isinstance(named, int) else list(named)
        return {axis % rank for axis in listed} if listed else set(range(rank))


_Rule = Callable[[_Call], Iterator[Cut]]


def _elementwise(call: _Call) -> Iterator[Cut]:
    for axis, size in enumerate(call.output):
        cut = tuple(_align(shape, call.output, axis) for shape in call.shapes)
        if size > 1 and any(own is not None for own in cut):
            yield cut, axis


def _align(shape: Sequence[int], output: Sequence[int], axis: int) -> int | None:
    """The axis that broadcasting aligns with an output's; None where a tensor is repeated along it."""
    own = axis - len(output) + len(shape)
    return own if own >= 0 and shape[own] == output[axis] else None


def _along(call: _Call) -> Iterator[Cut]:
    worked = call.dims("dim", "dims")
    for axis, size in enumerate(call.output):
        # The index of `index_add` has one axis and is not cut with the others.
        mine = [shape for shape in call.shapes if len(shape) == len(call.output)]
        if axis not in worked and size > 1 and all(shape[axis] == size for shape in mine):
            yield (
                tuple(axis if len(shape) == len(call.output) else None for shape in call.shapes),
                axis,
            )


def _gather(call: _Call) -> Iterator[Cut]:
    yield from _along(call)
    # Each index reads its own element, wherever that is along the axis.
    (worked,) = call.dims("dim")
    if call.output[worked] > 1:
        yield (None, worked), worked


def _reduction(call: _Call) -> Iterator[Cut]:
    worked = call.dims("dim")
    # `max` of two tensors has no axis to reduce, and that of a whole tensor reduces all.
    if "dim" in call.arguments:
        yield from _map_axes(call, worked, keeps=bool(call.arguments.get("keepdim", False)))


def _map_axes(call: _Call, worked: set[int], *, keeps: bool) -> Iterator[Cut]:
    """Cuts of one tensor along any axis but the worked ones, which stay or leave the output."""
    for axis, size in enumerate(call.shapes[0]):
        if axis not in worked and size > 1:
            yield (axis,), axis - (0 if keeps else sum(other < axis for other in worked))


def _attention(call: _Call) -> Iterator[Cut]:
    """Batch and heads of query, key, value and what has both; a mask only where it has the axis."""
    if call.arguments.get("dropout_p"):
        return
    mask = call.arguments.get("attn_mask")
    for axis in (0, 1):
        size = call.output[axis]
        cut: list[int | None] = []
        for tensor, shape in zip(call.tensors, call.shapes, strict=True):
            is_repeated = tensor is mask and (len(shape) < 4 or shape[axis] == 1)
            cut.append(None if is_repeated else axis)
        is_equal = all(
            own is None or shape[own] == size for own, shape in zip(cut, call.shapes, strict=True)
        )
        if size > 1 and is_equal:
            yield tuple(cut), axis


def _constant(call: _Call) -> Iterator[Cut]:
    for axis, size in enumerate(call.output):
        if size > 1:
            yield (), axis


def _embedding(call: _Call) -> Iterator[Cut]:
    weight, indices = call.shapes
    for axis, size in enumerate(indices):
        if size > 1:
            yield (None, axis), axis
    if weight[1] > 1:
        yield (1, None), len(indices)


def _expansion(call: _Call) -> Iterator[Cut]:
    for axis, size in enumerate(call.output):
        if size > 1:
            yield (_align(call.shapes[0], call.output, axis),), axis


def _index(call: _Call) -> Iterator[Cut]:
    """One index tensor of integers, whose axes take the place of the axis that it indexes."""
    indices = call.arguments["indices"]
    indexed = [axis for axis, index in enumerate(indices) if index is not None]
    if len(indexed) != 1 or not _is_integer(indices[indexed[0]]):
        return
    worked, (source, index) = indexed[0], call.shapes
    for axis, size in enumerate(index):
        if size > 1:
            yield (None, axis), worked + axis
    for axis, size in enumerate(source):
        if size > 1 and axis != worked:
            yield (axis, None), axis + (len(index) - 1 if axis > worked else 0)


def _is_integer(index: Tensor) -> bool:
    import torch

    return not index.is_floating_point() and index.dtype not in (torch.bool, torch.uint8)


def _index_select(call: _Call) -> Iterator[Cut]:
    (worked,) = call.dims("dim")
    for axis, size in enumerate(call.output):
        if size > 1:
            yield ((None, 0) if axis == worked else (axis, None)), axis


def _normalization(call: _Call) -> Iterator[Cut]:
    num_worked = len(call.arguments["normalized_shape"])
    scales = (None,) * (len(call.shapes) - 1)
    for axis, size in enumerate(call.output[: len(call.output) - num_worked]):
        if size > 1:
            yield (axis, *scales), axis


def _permutation(call: _Call) -> Iterator[Cut]:
    rank = len(call.output)
    order = list(range(rank))
    if "dims" in call.arguments:
        order = [axis % rank for axis in call.arguments["dims"]]
    else:
        # `t` swaps the axes of a matrix.
        first, second = (call.arguments.get(name, i) for i, name in enumerate(("dim0", "dim1")))
        if rank > 1:
            order[first], order[second] = order[second], order[first]
    for axis, own in enumerate(order):
        if call.output[axis] > 1:
            yield (own,), axis


def _product(call: _Call) -> Iterator[Cut]:
    """Rows of the left, columns of the right, or the batch of both; a bias as it is repeated."""
    rank = len(call.output)
    for axis, size in enumerate(call.output):
        if size > 1:
            left = None if axis == rank - 1 else axis
            right = None if axis == rank - 2 else axis
            bias = (_align(shape, call.output, axis) for shape in call.shapes[:-2])
            yield (*bias, left, right), axis


def _reshape(call: _Call) -> Iterator[Cut]:
    """Axes with equally many elements ahead of them, one of which the other divides."""
    (source,) = call.shapes
    for own, own_size in enumerate(source):
        for axis, size in enumerate(call.output):
            is_first = prod(source[:own]) == prod(call.output[:axis])
            divides = own_size > 1 and size > 1 and not max(own_size, size) % min(own_size, size)
            if is_first and divides:
                yield (own,), axis


def _selection(call: _Call) -> Iterator[Cut]:
    yield from _map_axes(call, call.dims("dim"), keeps=False)


def _slice(call: _Call) -> Iterator[Cut]:
    # A slice of all keeps every axis, that of the slice too: parts end before its end.
    if call.shapes[0] == call.output and call.arguments["step"] == 1:
        yield from _elementwise(call)
    else:
        yield from _along(call)


def _squeeze(call: _Call) -> Iterator[Cut]:
    # An axis named here stays if its size is above 1, but would leave a part of size 1.
    if "dim" in call.arguments:
        worked = call.dims("dim")
        for axis, size in enumerate(call.shapes[0]):
            if axis not in worked and size > 1:
                yield (
                    (axis,),
                    axis - sum(call.shapes[0][other] == 1 for other in worked if other < axis),
                )


def _triangle(call: _Call) -> Iterator[Cut]:
    for axis, size in enumerate(call.output[:-2]):
        if size > 1:
            yield (axis,), axis


def _unsqueeze(call: _Call) -> Iterator[Cut]:
    inserted = call.arguments["dim"] % len(call.output)
    for axis, size in enumerate(call.shapes[0]):
        if size > 1:
            yield (axis,), axis + (axis >= inserted)


_RULES: dict[str, _Rule] = {
    "along": _along,
    "attention": _attention,
    "constant": _constant,
    "elementwise": _elementwise,
    "embedding": _embedding,
    "expansion": _expansion,
    "gather": _gather,
    "index": _index,
    "index_select": _index_select,
    "normalization": _normalization,
    "permutation": _permutation,
    "product": _product,
    "reduction": _reduction,
    "reshape": _reshape,
    "selection": _selection,
    "slice": _slice,
    "squeeze": _squeeze,
    "triangle": _triangle,
    "unsqueeze": _unsqueeze,
}
_RULE_BY_OP = {op: _RULES[rule] for rule, ops in AXIS_RULES.items() for op in ops}
