"""Softmax over the edges of each row in plain torch: the definition."""

import torch
from torch import Tensor

__all__ = ["edge_softmax", "edge_softmax_backward", "softmax_state", "softmax_state_backward"]


def _rows_of(indptr: Tensor) -> Tensor:
    return torch.repeat_interleave(
        torch.arange(len(indptr) - 1, device=indptr.device), indptr.diff()
    )


def _sum_rows(indptr: Tensor, terms: Tensor) -> Tensor:
    total = terms.new_zeros(len(indptr) - 1, *terms.shape[1:])
    return total.index_add_(0, _rows_of(indptr), terms)


def _powers(indptr: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
    """The largest logit of each row [rows, heads], and e^(logit - largest) of each edge."""
    rows = _rows_of(indptr)
    maximum = logits.new_full((len(indptr) - 1, logits.shape[1]), -torch.inf)
    maximum.scatter_reduce_(0, rows[:, None].expand_as(logits), logits, "amax")
    # A row of -inf alone: -inf less 0, and not less itself.
    shift = maximum.masked_fill(maximum == -torch.inf, 0)
    return maximum, (logits - shift[rows]).exp()


def edge_softmax(indptr: Tensor, logits: Tensor) -> Tensor:
    """The weight of each edge and head [edges, heads]."""
    _, powers = _powers(indptr, logits)
    total = _sum_rows(indptr, powers)
    return powers / total.masked_fill(total == 0, 1)[_rows_of(indptr)]


def edge_softmax_backward(indptr: Tensor, weights: Tensor, grad: Tensor) -> Tensor:
    """The gradient of the logits for that of the weights."""
    mean = _sum_rows(indptr, weights * grad)
    return weights * (grad - mean[_rows_of(indptr)])


def softmax_state(
    indptr: Tensor, logits: Tensor, values: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Largest logits, each edge's e^(logit - largest), their sums, and the sums of them times values."""
    maximum, powers = _powers(indptr, logits)
    total = _sum_rows(indptr, powers)
    return maximum, powers, total, _sum_rows(indptr, powers[..., None] * values)


def softmax_state_backward(
    indptr: Tensor, powers: Tensor, values: Tensor, grad_total: Tensor, grad_weighted: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradients of logits and values for those of the sums."""
    rows = _rows_of(indptr)
    grad = grad_weighted[rows]
    return powers * (grad_total[rows] + (grad * values).sum(2)), powers[..., None] * grad
