"""The order in which blocks of logits are gone over, and products with their slopes summed."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

__all__ = ["block_of", "spans", "summed_products"]


def block_of(num_rows: int, num_cols: int, *, most_rows: int, most_logits: int) -> tuple[int, int]:
    """Rows and columns of a block of at most so many logits, or of one column.

    It has more than `most_rows` only where its rows are whole.
    """
    rows = max(1, min(num_rows, max(most_rows, most_logits // num_cols)))
    return rows, max(1, most_logits // rows)


def spans(size: int, longest: int) -> Iterator[slice]:
    """Consecutive ranges of at most so many."""
    for start in range(0, size, longest):
        yield slice(start, min(start + longest, size))


def summed_products(
    slopes: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor],
    hidden: Tensor,
    weight: Tensor,
    tokens: Tensor,
    terms: Tensor,
    *,
    block: tuple[int, int],
) -> tuple[Tensor, Tensor]:
    """Gradients of `hidden` and `weight`, from blocks of slopes that are made and dropped.

    A block of the vocabulary takes all rows before the next: its rows of the weight's gradient are
    then summed in one place and rounded once, without atomics, and only those of `hidden` are gone
    over again for each block.

    Args:
        slopes: of the logits of some rows and columns, from their part of the other arguments.
        hidden, tokens, terms: of all rows; products are in the type of `hidden`.
        weight: of all columns.
        block: rows and columns at once.
    """
    wide = torch.promote_types(hidden.dtype, torch.float32)
    grad_hidden = torch.zeros_like(hidden, dtype=wide)
    grad_weight = torch.zeros_like(weight)
    for cols in spans(len(weight), block[1]):
        head = weight[cols].to(hidden.dtype)
        of_head = torch.zeros_like(head, dtype=wide)
        for rows in spans(len(hidden), block[0]):
            slope = slopes(hidden[rows], head, tokens[rows] - cols.start, terms[:, rows])
            grad_hidden[rows] += slope @ head
            of_head += slope.t() @ hidden[rows]
        grad_weight[cols] = of_head
    return grad_hidden.to(hidden.dtype), grad_weight
