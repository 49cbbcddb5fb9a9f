"""Softmax over the edges of each row in Triton: a program a row and head, several edges at once."""

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["edge_softmax", "edge_softmax_backward", "softmax_state", "softmax_state_backward"]

# Edges of logits that are loaded together, and elements of values.
_EDGES = 32
_TILE = 512


@triton.jit
def _top_of(logits, first, count, head, heads, SUM: tl.constexpr, EDGES: tl.constexpr):  # noqa: ANN001, ANN202
    """The largest logit of a row, NaN if one is, and what to subtract: 0 in place of -inf."""
    top = tl.full([EDGES], float("-inf"), SUM)
    for start in range(0, count, EDGES):
        nth = start + tl.arange(0, EDGES)
        logit = tl.load(
            logits + (first + nth) * heads + head, mask=nth < count, other=float("-inf")
        )
        top = tl.maximum(top, logit, propagate_nan=tl.PropagateNan.ALL)
    has_nan = tl.max((top != top).to(tl.int32), 0) > 0  # noqa: PLR0124  NaN
    largest = tl.max(top, 0)
    largest = tl.where(has_nan, float("nan"), largest)
    return largest, tl.where(largest == float("-inf"), 0.0, largest)


@triton.jit
def _softmax(indptr, logits, weights, heads, SUM: tl.constexpr, EDGES: tl.constexpr):  # noqa: ANN001, ANN202
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    first = tl.load(indptr + row)
    count = (tl.load(indptr + row + 1) - first).to(tl.int32)
    _, shift = _top_of(logits, first, count, head, heads, SUM, EDGES)
    sums = tl.zeros([EDGES], SUM)
    for start in range(0, count, EDGES):
        nth = start + tl.arange(0, EDGES)
        logit = tl.load(
            logits + (first + nth) * heads + head, mask=nth < count, other=float("-inf")
        )
        sums += tl.where(nth < count, tl.exp(logit - shift), 0.0)
    total = tl.sum(sums, 0)
    total = tl.where(total == 0, 1.0, total)
    for start in range(0, count, EDGES):
        nth = start + tl.arange(0, EDGES)
        place = (first + nth) * heads + head
        logit = tl.load(logits + place, mask=nth < count, other=float("-inf"))
        tl.store(weights + place, tl.exp(logit - shift) / total, mask=nth < count)


@triton.jit
def _softmax_grad(indptr, weights, grad, out, heads, SUM: tl.constexpr, EDGES: tl.constexpr):  # noqa: ANN001, ANN202
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    first = tl.load(indptr + row)
    count = (tl.load(indptr + row + 1) - first).to(tl.int32)
    sums = tl.zeros([EDGES], SUM)
    for start in range(0, count, EDGES):
        nth = start + tl.arange(0, EDGES)
        place = (first + nth) * heads + head
        weight = tl.load(weights + place, mask=nth < count, other=0.0)
        sums += weight * tl.load(grad + place, mask=nth < count, other=0.0)
    mean = tl.sum(sums, 0)
    for start in range(0, count, EDGES):
        nth = start + tl.arange(0, EDGES)
        place = (first + nth) * heads + head
        weight = tl.load(weights + place, mask=nth < count, other=0.0)
        slope = tl.load(grad + place, mask=nth < count, other=0.0)
        tl.store(out + place, weight * (slope - mean), mask=nth < count)


@triton.jit
def _state(  # noqa: ANN202
    indptr,  # noqa: ANN001
    logits,  # noqa: ANN001
    values,  # noqa: ANN001
    maximum,  # noqa: ANN001
    powers,  # noqa: ANN001
    total,  # noqa: ANN001
    weighted,  # noqa: ANN001
    heads,  # noqa: ANN001
    dim,  # noqa: ANN001
    SUM: tl.constexpr,
    EDGES: tl.constexpr,
    COLS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    cols = tl.arange(0, COLS)
    first = tl.load(indptr + row)
    count = (tl.load(indptr + row + 1) - first).to(tl.int32)
    top, shift = _top_of(logits, first, count, head, heads, SUM, EDGES)
    powers_sum = tl.zeros([EDGES], SUM)
    values_sum = tl.zeros([EDGES, COLS], SUM)
    for start in range(0, count, EDGES):
        nth = start + tl.arange(0, EDGES)
        is_edge = nth < count
        place = (first + nth) * heads + head
        logit = tl.load(logits + place, mask=is_edge, other=float("-inf"))
        power = tl.where(is_edge, tl.exp(logit - shift), 0.0)
        tl.store(powers + place, power, mask=is_edge)
        powers_sum += power
        is_value = is_edge[:, None] & (cols < dim)[None, :]
        value = tl.load(values + place[:, None] * dim + cols[None, :], mask=is_value, other=0.0)
        values_sum += power[:, None] * value
    tl.store(maximum + row * heads + head, top)
    tl.store(total + row * heads + head, tl.sum(powers_sum, 0))
    out = weighted + (row * heads + head) * dim + cols
    tl.store(out, tl.sum(values_sum, 0), mask=cols < dim)


@triton.jit
def _state_grad(  # noqa: ANN202
    indptr,  # noqa: ANN001
    powers,  # noqa: ANN001
    values,  # noqa: ANN001
    grad_total,  # noqa: ANN001
    grad_weighted,  # noqa: ANN001
    grad_logits,  # noqa: ANN001
    grad_values,  # noqa: ANN001
    heads,  # noqa: ANN001
    dim,  # noqa: ANN001
    EDGES: tl.constexpr,
    COLS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    cols = tl.arange(0, COLS)
    first = tl.load(indptr + row)
    count = (tl.load(indptr + row + 1) - first).to(tl.int32)
    slope = tl.load(grad_total + row * heads + head)
    grad = tl.load(grad_weighted + (row * heads + head) * dim + cols, mask=cols < dim, other=0.0)
    for start in range(0, count, EDGES):
        nth = start + tl.arange(0, EDGES)
        is_edge = nth < count
        place = (first + nth) * heads + head
        power = tl.load(powers + place, mask=is_edge, other=0.0)
        is_value = is_edge[:, None] & (cols < dim)[None, :]
        part = place[:, None] * dim + cols[None, :]
        value = tl.load(values + part, mask=is_value, other=0.0)
        product = tl.sum(grad[None, :] * value, 1)
        tl.store(grad_logits + place, power * (slope + product), mask=is_edge)
        tl.store(grad_values + part, power[:, None] * grad[None, :], mask=is_value)


def _sum_type(tensor: Tensor) -> tl.dtype:
    return tl.float64 if tensor.dtype == torch.float64 else tl.float32


def _tile(dim: int) -> dict[str, int]:
    cols = triton.next_power_of_2(max(dim, 1))
    return {"COLS": cols, "EDGES": max(1, _TILE // cols)}


def edge_softmax(indptr: Tensor, logits: Tensor) -> Tensor:
    """The weight of each edge and head [edges, heads]."""
    weights = torch.empty_like(logits)
    if weights.numel():
        grid = (len(indptr) - 1, logits.shape[1])
        sums = _sum_type(logits)
        _softmax[grid](indptr, logits, weights, logits.shape[1], SUM=sums, EDGES=_EDGES)
    return weights


def edge_softmax_backward(indptr: Tensor, weights: Tensor, grad: Tensor) -> Tensor:
    """The gradient of the logits for that of the weights."""
    out = torch.empty_like(weights)
    if out.numel():
        grid = (len(indptr) - 1, weights.shape[1])
        sums = _sum_type(weights)
        _softmax_grad[grid](indptr, weights, grad, out, weights.shape[1], SUM=sums, EDGES=_EDGES)
    return out


def softmax_state(
    indptr: Tensor, logits: Tensor, values: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Largest logits, each edge's e^(logit - largest), their sums, and the sums of them times values."""
    num_rows, (_, heads, dim) = len(indptr) - 1, values.shape
    maximum, total = logits.new_empty(2, num_rows, heads)
    powers, weighted = torch.empty_like(logits), values.new_empty(num_rows, heads, dim)
    if total.numel():
        _state[num_rows, heads](
            indptr,
            logits,
            values,
            maximum,
            powers,
            total,
            weighted,
            heads,
            dim,
            SUM=_sum_type(values),
            **_tile(dim),
        )
    return maximum, powers, total, weighted


def softmax_state_backward(
    indptr: Tensor, powers: Tensor, values: Tensor, grad_total: Tensor, grad_weighted: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradients of logits and values for those of the sums."""
    grad_logits, grad_values = torch.empty_like(powers), torch.empty_like(values)
    if powers.numel():
        _, heads, dim = values.shape
        _state_grad[len(indptr) - 1, heads](
            indptr,
            powers,
            values,
            grad_total,
            grad_weighted,
            grad_logits,
            grad_values,
            heads,
            dim,
            **_tile(dim),
        )
    return grad_logits, grad_values
