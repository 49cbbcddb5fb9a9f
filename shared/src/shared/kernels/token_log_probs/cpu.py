"""Log-probabilities of tokens in torch operations, over blocks of logits that stay in the cache.

Half types are widened a block at a time, so that logits are never rounded to them.
"""

from functools import partial

import torch
from torch import Tensor

from shared.kernels.token_log_probs.blocks import block_of, spans, summed_products
from shared.kernels.token_log_probs.sums import merge

__all__ = ["gradients", "partial_sums"]

# Four megabytes of float32: what is done to a block after its product finds it in a cache.
MOST_ROWS = 256
MOST_LOGITS = 1 << 20


def partial_sums(hidden: Tensor, weight: Tensor, tokens: Tensor, temperature: float) -> Tensor:
    """Sums over one block of the vocabulary after another."""
    states = _wide(hidden)
    sums = states.new_empty(4, len(states))
    rows_at_once, cols_at_once = _block(states, weight)
    for cols in spans(len(weight), cols_at_once):
        head = weight[cols].to(states.dtype)
        for rows in spans(len(states), rows_at_once):
            logits = _logits(states[rows], head, temperature)
            found = _sums(logits, tokens[rows] - cols.start)
            if cols.start:
                found = merge(torch.stack([sums[:, rows], found], 1))
            sums[:, rows] = found
    return sums


def gradients(
    hidden: Tensor, weight: Tensor, tokens: Tensor, temperature: float, terms: Tensor
) -> tuple[Tensor, Tensor]:
    """Products with slopes in float32, or float64 for such states."""
    slopes, block = partial(_slopes, temperature), _block(hidden, weight)
    grad_hidden, grad_weight = summed_products(
        slopes, _wide(hidden), weight, tokens, terms, block=block
    )
    return grad_hidden.to(hidden.dtype), grad_weight


def _sums(logits: Tensor, tokens: Tensor) -> Tensor:
    top = logits.amax(1)
    place, is_here = _place(tokens, logits.shape[1])
    chosen = logits.gather(1, place).masked_fill_(~is_here, 0)[:, 0]
    shifted = logits.sub_(top[:, None])
    exp = shifted.exp()
    return torch.stack([top, exp.sum(1), exp.mul_(shifted).sum(1), chosen])


def _slopes(
    temperature: float, states: Tensor, head: Tensor, tokens: Tensor, terms: Tensor
) -> Tensor:
    normalizer, level, tilt, chosen = terms[:, :, None]
    log_p = _logits(states, head, temperature).sub_(normalizer)
    slopes = log_p.exp().mul_(log_p.mul_(tilt).add_(level))
    place, is_here = _place(tokens, len(head))
    return slopes.scatter_add_(1, place, chosen * is_here)


def _logits(states: Tensor, head: Tensor, temperature: float) -> Tensor:
    logits = states @ head.t()
    return logits if temperature == 1.0 else logits.div_(temperature)


def _place(tokens: Tensor, num_cols: int) -> tuple[Tensor, Tensor]:
    """The columns of tokens, and whether they are of this block; [rows, 1]."""
    place = tokens[:, None].clamp(0, num_cols - 1)
    return place, place == tokens[:, None]


def _wide(states: Tensor) -> Tensor:
    return states.to(torch.promote_types(states.dtype, torch.float32))


def _block(hidden: Tensor, weight: Tensor) -> tuple[int, int]:
    return block_of(len(hidden), len(weight), most_rows=MOST_ROWS, most_logits=MOST_LOGITS)
