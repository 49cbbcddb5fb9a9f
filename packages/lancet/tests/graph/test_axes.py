from itertools import product

import pytest
import torch

from lancet.graph.axes import allowed
from lancet.graph.axis_rules import AXIS_RULES

aten = torch.ops.aten


def floats(*shape):
    return torch.rand(shape, dtype=torch.float64) * 1.5 + 0.1


def booleans(*shape):
    return torch.rand(shape) > 0.5


def integers(high, *shape):
    return torch.randint(high, shape)


# All sizes of a call differ but those that must be equal, so that no wrong cut fits by chance.
UNARY = [
    "abs",
    "bitwise_not",
    "ceil",
    "clone",
    "cos",
    "detach",
    "erf",
    "exp",
    "floor",
    "gelu",
    "log",
    "logical_not",
    "neg",
    "reciprocal",
    "relu",
    "rsqrt",
    "sigmoid",
    "silu",
    "sin",
    "sqrt",
    "tanh",
    "alias",
    "zeros_like",
    "ones_like",
]
BINARY = [
    "add.Tensor",
    "sub.Tensor",
    "mul.Tensor",
    "div.Tensor",
    "eq.Tensor",
    "ne.Tensor",
    "lt.Tensor",
    "le.Tensor",
    "gt.Tensor",
    "ge.Tensor",
    "maximum.default",
    "minimum.default",
    "pow.Tensor_Tensor",
    "remainder.Tensor",
    "logical_and.default",
    "logical_or.default",
    "floor_divide.default",
    "rsub.Tensor",
    "sigmoid_backward.default",
    "silu_backward.default",
    "tanh_backward.default",
    "gelu_backward.default",
]


def overload(name):
    packet, _, name = name.partition(".")
    return getattr(getattr(aten, packet), name or "default")


def list_calls():
    """One call or more of every operator of the table: (op, args, kwargs)."""
    torch.manual_seed(0)
    for name in UNARY:
        x = booleans(4, 1, 6) if "not" in name else floats(4, 1, 6)
        yield overload(name), (x,), {}
    for name in BINARY:
        yield overload(name), (floats(4, 5, 6), floats(4, 5, 6)), {}
        if "backward" not in name:
            yield overload(name), (floats(4, 1, 6), floats(5, 1)), {}
    for name in (
        "add.Scalar",
        "mul.Scalar",
        "pow.Tensor_Scalar",
        "eq.Scalar",
        "lt.Scalar",
        "ge.Scalar",
    ):
        yield overload(name), (floats(4, 6), 2), {}
    yield aten.bitwise_and.Tensor, (booleans(4, 6), booleans(6)), {}
    yield aten.bitwise_or.Tensor, (booleans(4, 6), booleans(4, 1)), {}
    yield aten.addcmul.default, (floats(4, 6), floats(6), floats(4, 1)), {}
    yield aten.clamp.default, (floats(4, 6), 0.3, 0.9), {}
    yield aten.clamp_min.default, (floats(4, 6), 0.3), {}
    yield aten.clamp_max.default, (floats(4, 6), 0.3), {}
    yield aten.copy.default, (floats(4, 6), floats(6)), {}
    yield aten.full_like.default, (floats(4, 6), 2.0), {}
    yield aten.masked_fill.Scalar, (floats(4, 6), booleans(4, 1), 0.0), {}
    yield aten.masked_fill.Tensor, (floats(4, 6), booleans(6), floats()), {}
    yield aten.pow.Scalar, (2.0, floats(4, 6)), {}
    yield aten.rsub.Scalar, (floats(4, 6), 1.0), {}
    yield aten.threshold_backward.default, (floats(4, 6), floats(4, 6) - 0.8, 0.0), {}
    yield aten.where.self, (booleans(4, 1), floats(4, 6), floats()), {}
    yield overload("_to_copy"), (floats(4, 6),), {"dtype": torch.float32}

    yield aten.cat.default, ([floats(4, 2, 6), floats(4, 3, 6)], -2), {}
    yield aten.cumsum.default, (floats(4, 5, 6), 1), {}
    yield aten.flip.default, (floats(4, 5, 6), [0, -1]), {}
    yield aten.gather.default, (floats(4, 7, 6), 1, integers(7, 4, 5, 6)), {}
    yield aten.gather.default, (floats(4, 7, 6), 1, integers(7, 3, 5, 6)), {}
    yield aten.index_add.default, (floats(4, 5, 6), 1, integers(5, 3), floats(4, 3, 6)), {}
    yield aten.index_add.default, (floats(5), 0, integers(5, 5), floats(5)), {}
    yield aten.scatter.src, (floats(4, 7), 1, integers(7, 4, 3), floats(4, 3)), {}
    yield aten.scatter.src, (floats(4, 7), 1, integers(7, 4, 3), floats(5, 3)), {}
    yield aten.scatter.value, (floats(4, 7), 1, integers(7, 4, 3), 1.0), {}
    yield aten.scatter_add.default, (floats(4, 7), 1, integers(7, 4, 3), floats(4, 3)), {}
    yield aten.sort.default, (floats(4, 5, 6), 1), {}
    yield aten.sort.stable, (floats(4, 5, 6),), {"stable": True, "descending": True}
    yield aten.split.Tensor, (floats(4, 5, 6), 2, -1), {}
    yield aten.split_with_sizes.default, (floats(4, 5, 6), [2, 3], 1), {}
    yield aten.topk.default, (floats(4, 5, 6), 2, 1), {}
    yield aten.topk.default, (floats(4, 7), 2), {}
    for name in ("_softmax.default", "_log_softmax.default"):
        yield overload(name), (floats(4, 5, 6), -1, False), {}
        yield overload(name), (floats(4, 5, 6), 0, False), {}
    yield overload("_safe_softmax.default"), (floats(4, 6, 5), -1), {}
    for name in ("_softmax_backward_data.default", "_log_softmax_backward_data.default"):
        yield overload(name), (floats(4, 5, 6), floats(4, 5, 6), 1, torch.float64), {}

    for name in (
        "amax.default",
        "amin.default",
        "logsumexp.default",
        "mean.dim",
        "sum.dim_IntList",
    ):
        yield overload(name), (floats(4, 5, 6), [-2]), {}
        yield overload(name), (floats(4, 5, 6), [0, 2], True), {}
    for name in ("argmax.default", "argmin.default", "max.dim", "min.dim"):
        yield overload(name), (floats(4, 5, 6), 1), {}
        yield overload(name), (floats(4, 5, 6), 1, True), {}
    yield aten.any.dim, (booleans(4, 5, 6), 0), {}
    for name in ("sum.default", "mean.default", "max.default", "min.default", "argmax.default"):
        yield overload(name), (floats(4, 5),), {}

    query = floats(4, 3, 5, 8)
    forward = overload("_scaled_dot_product_flash_attention_for_cpu")
    backward = overload("_scaled_dot_product_flash_attention_for_cpu_backward")
    masks = [None, floats(4, 1, 5, 5), floats(1, 3, 5, 5), floats(5, 5)]
    for mask in masks:
        key, value = floats(4, 3, 5, 8), floats(4, 3, 5, 8)
        yield forward, (query, key, value), {"attn_mask": mask}
        out, logsumexp = forward(query, key, value, attn_mask=mask)
        grad = floats(*out.shape)
        yield (
            backward,
            (grad, query, key, value, out, logsumexp, 0.0, False),
            {"attn_mask": mask},
        )
    yield forward, (query, floats(4, 3, 5, 8), floats(4, 3, 5, 8), 0.0, True), {}

    yield aten.full.default, ([4, 6], 2.0), {}
    yield aten.ones.default, ([4, 1, 6],), {}
    yield aten.zeros.default, ([4],), {}
    yield aten.embedding.default, (floats(9, 5), integers(9, 4, 6)), {}
    yield aten.expand.default, (floats(4, 1, 6), [4, 5, 6]), {}
    yield aten.expand.default, (floats(1, 6), [3, 4, 6]), {}
    yield aten.expand.default, (floats(4, 1, 6), [-1, 5, -1]), {}
    yield aten.index.Tensor, (floats(7, 4), [integers(7, 5, 3)]), {}
    yield aten.index.Tensor, (floats(4, 7, 6), [None, integers(7, 5)]), {}
    yield aten.index.Tensor, (floats(4, 7), [booleans(4)]), {}
    yield aten.index.Tensor, (floats(4, 7), [integers(4, 5), integers(7, 5)]), {}
    yield aten.index_select.default, (floats(4, 7, 6), 1, integers(7, 5)), {}
    yield aten.native_layer_norm.default, (floats(4, 5, 6), [6], floats(6), floats(6), 1e-5), {}
    yield aten.native_layer_norm.default, (floats(4, 5, 6), [5, 6], None, None, 1e-5), {}
    yield overload("_fused_rms_norm"), (floats(4, 5, 6), [6], floats(6), 1e-5), {}
    yield aten.permute.default, (floats(4, 5, 6), [2, 0, 1]), {}
    yield aten.permute.default, (floats(4, 5, 6), [-1, 0, -2]), {}
    yield aten.t.default, (floats(4, 5),), {}
    yield aten.t.default, (floats(4),), {}
    yield aten.transpose.int, (floats(4, 5, 6), -1, 0), {}
    yield aten.addmm.default, (floats(6), floats(4, 5), floats(5, 6)), {}
    yield aten.addmm.default, (floats(4, 1), floats(4, 5), floats(5, 6)), {}
    yield aten.baddbmm.default, (floats(3, 1, 6), floats(3, 4, 5), floats(3, 5, 6)), {}
    yield aten.bmm.default, (floats(3, 4, 5), floats(3, 5, 6)), {}
    yield aten.mm.default, (floats(4, 5), floats(5, 6)), {}
    yield aten.mm.default, (floats(1, 5), floats(5, 6)), {}
    for name in ("view.default", "reshape.default", "_unsafe_view.default"):
        yield overload(name), (floats(4, 5, 6), [20, 6]), {}
        yield overload(name), (floats(12, 6), [4, 3, 6]), {}
        yield overload(name), (floats(4, 6), [-1, 2, 3]), {}
        yield overload(name), (floats(4, 1, 6), [4, 6]), {}
        yield overload(name), (floats(4, 6), [6, 4]), {}
    yield aten.select.int, (floats(4, 5, 6), 1, -1), {}
    yield aten.slice.Tensor, (floats(4, 5, 6), 1, 1, 4), {}
    yield aten.slice.Tensor, (floats(4, 5, 6), 1), {}
    yield aten.slice.Tensor, (floats(4, 5, 6), 0, 0, 2**63 - 1), {}
    yield aten.squeeze.dim, (floats(4, 1, 6), 1), {}
    yield aten.squeeze.dims, (floats(1, 4, 1, 6), [0, 2]), {}
    yield aten.squeeze.dim, (floats(4, 6), 0), {}
    yield aten.squeeze.default, (floats(4, 1, 6),), {}
    yield aten.tril.default, (floats(3, 4, 5),), {}
    yield aten.triu.default, (floats(3, 4, 5), 1), {}
    yield aten.unsqueeze.default, (floats(4, 5), 1), {}
    yield aten.unsqueeze.default, (floats(4, 5), -1), {}


CALLS = list(list_calls())
NAMES = [f"{op}-{number}" for number, (op, _, _) in enumerate(CALLS)]


def flatten(values):
    """Tensors of arguments or outputs in order."""
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from flatten(value)
        elif isinstance(value, torch.Tensor):
            yield value


def run(op, args, kwargs):
    output = op(*args, **kwargs)
    return list(flatten(output if isinstance(output, (list, tuple)) else [output]))


def run_part(op, args, kwargs, cut, axis, interval):
    """Runs an operator on its tensors' parts, its sizes changed to those of the output's part."""
    axes = iter(cut)
    start, stop = interval

    def take(value):
        if isinstance(value, torch.Tensor):
            own = next(axes)
            if own is None:
                return value
            size = value.shape[own]
            return value.narrow(own, round(start * size), round(stop * size) - round(start * size))
        if isinstance(value, (list, tuple)) and any(isinstance(v, torch.Tensor) for v in value):
            return [take(v) for v in value]
        return value

    parts, named = [take(value) for value in args], {k: take(v) for k, v in kwargs.items()}
    sizes = {
        "view": 1,
        "reshape": 1,
        "_unsafe_view": 1,
        "expand": 1,
        "full": 0,
        "ones": 0,
        "zeros": 0,
    }
    number = sizes.get(str(op.overloadpacket).removeprefix("aten."))
    if number is not None:
        part_sizes = list(parts[number])
        if part_sizes[axis] != -1:
            size = part_sizes[axis]
            part_sizes[axis] = round(stop * size) - round(start * size)
        parts[number] = part_sizes
    return run(op, parts, named)


def is_exact(op, args, kwargs, cut, axis, share):
    """Whether two parts' results are those of the whole."""
    whole = run(op, args, kwargs)
    try:
        halves = [
            run_part(op, args, kwargs, cut, axis, interval) for interval in ((0, share), (share, 1))
        ]
        return all(
            torch.allclose(torch.cat(pair, axis).double(), result.double(), rtol=1e-10, atol=1e-12)
            if torch.cat(pair, axis).shape == result.shape
            else False
            for *pair, result in zip(*halves, whole, strict=True)
        )
    except (RuntimeError, IndexError, ValueError):
        return False


def list_shares(op, args, kwargs, cut, axis):
    """Shares of the whole at which every cut axis and the output's are cut between two elements."""
    tensors = [*flatten([*args, *kwargs.values()])]
    sizes = {t.shape[own] for t, own in zip(tensors, cut, strict=True) if own is not None}
    sizes.add(run(op, args, kwargs)[0].shape[axis])
    least = min(sizes)
    # Only a reshape has two sizes, one of which divides the other.
    assert all(size % least == 0 for size in sizes)
    return [number / least for number in range(1, least)]


def test_every_rule_has_a_call():
    called = {str(op.overloadpacket) for op, _, _ in CALLS}
    table = [op for ops in AXIS_RULES.values() for op in ops]
    assert len(table) == len(set(table)) >= 70
    assert called == set(table)


@pytest.mark.parametrize(("op", "args", "kwargs"), CALLS, ids=NAMES)
def test_parts_of_every_cut_are_those_of_the_whole(op, args, kwargs):
    for cut, axis in allowed(op, *args, **kwargs):
        for share in list_shares(op, args, kwargs, cut, axis):
            assert is_exact(op, args, kwargs, cut, axis, share), (cut, axis, share)


# Constants and full slices are equal along every axis; attention ends the process on unlike shapes.
_SKIPPED = {"aten.squeeze", "aten.index", "aten.ones", "aten.zeros", "aten.full"} | set(
    AXIS_RULES["attention"]
)
COMPLETE = [
    number for number, call in enumerate(CALLS) if str(call[0].overloadpacket) not in _SKIPPED
]


@pytest.mark.parametrize("number", COMPLETE, ids=lambda number: NAMES[number])
def test_no_other_cut_is_exact(number):
    op, args, kwargs = CALLS[number]
    tensors = [*flatten([*args, *kwargs.values()])]
    outputs = run(op, args, kwargs)
    choices = [[None, *(i for i, size in enumerate(t.shape) if size > 1)] for t in tensors]
    exact = set()
    for axis in range(outputs[0].dim()):
        for cut in product(*choices):
            if outputs[0].shape[axis] < 2 or (tensors and not any(c is not None for c in cut)):
                continue
            sizes = {t.shape[own] for t, own in zip(tensors, cut, strict=True) if own is not None}
            sizes.add(outputs[0].shape[axis])
            if any(size % min(sizes) for size in sizes):
                continue
            if is_exact(op, args, kwargs, cut, axis, 1 / min(sizes)):
                exact.add((cut, axis))
    assert exact <= allowed(op, *args, **kwargs)


def test_cuts_by_hand():
    a, b = torch.rand(4, 5), torch.rand(5, 6)
    assert allowed(aten.mm.default, a, b) == {((0, None), 0), ((None, 1), 1)}
    assert allowed(aten.add.Tensor, torch.rand(4, 1), torch.rand(6)) == {
        ((0, None), 0),
        ((None, 0), 1),
    }
    assert allowed(overload("_softmax"), torch.rand(4, 5), -1, False) == {((0,), 0)}
    assert allowed(aten.sum.dim_IntList, torch.rand(4, 5, 6), [1]) == {((0,), 0), ((2,), 1)}
    # Tokens of a batch in one axis: whole sequences may be cut off.
    assert allowed(aten.view.default, torch.rand(4, 5, 6), [20, 6]) == {((0,), 0), ((2,), 1)}


def test_meta_tensors_will_do():
    a, b = (torch.empty(4, 4, device="meta") for _ in range(2))
    assert allowed(aten.mm.default, a, b) == {((0, None), 0), ((None, 1), 1)}


def test_operator_without_a_rule_stays_whole():
    assert allowed(aten.native_dropout.default, torch.rand(4, 5), 0.5, True) == set()
    assert allowed(aten.arange.default, 5) == set()
    assert allowed(aten.nonzero.default, torch.ones(4)) == set()
