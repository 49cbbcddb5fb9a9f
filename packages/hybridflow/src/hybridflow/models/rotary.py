"""Rotary positions (Su et al., arXiv 2104.09864), applied to a fused product's queries and keys.

Forward writes into one buffer and backward into one gradient: separate slices, products and
concatenations would take a third of a small layer's time.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

__all__ = ["rotate"]


def rotate(
    qkv: Float[Tensor, "batch tokens heads dim"],
    cos: Float[Tensor, "#batch tokens 1 half"],
    sin: Float[Tensor, "#batch tokens 1 half"],
    num_heads: int,
    num_kv_heads: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Rotates queries and keys by their positions; values are unchanged.

    A head's first and second half are the two coordinates of its pairs, as in Hugging Face's code.

    Args:
        qkv: heads of queries, keys and values, concatenated.
        cos, sin: of each token's angles.
        num_heads, num_kv_heads: number of query heads, and of key (and value) heads.

    Returns:
        Queries, keys and values [batch, tokens, heads, dim].
    """
    return _Rotate.apply(qkv, cos, sin, num_heads, num_kv_heads)


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, qkv: Tensor, cos: Tensor, sin: Tensor, num_heads: int, num_kv_heads: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        turning = num_heads + num_kv_heads
        ctx.sizes = (num_heads, num_kv_heads)
        turned = qkv.new_empty(*qkv.shape[:2], turning, qkv.shape[3])
        _turn(qkv[:, :, :turning], cos, sin, turned)
        return turned[:, :, :num_heads], turned[:, :, num_heads:], qkv[:, :, turning:].clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        cos, sin = ctx.saved_tensors
        num_heads, num_kv_heads = ctx.sizes
        of_q, of_k, of_v = grads
        turning = num_heads + num_kv_heads
        grad = of_q.new_empty(*of_q.shape[:2], turning + num_kv_heads, of_q.shape[3])
        # Rotated back: a rotation's transpose is its inverse.
        _turn(of_q, cos, -sin, grad[:, :, :num_heads])
        _turn(of_k, cos, -sin, grad[:, :, num_heads:turning])
        grad[:, :, turning:] = of_v
        return grad, None, None, None, None


def _turn(values: Tensor, cos: Tensor, sin: Tensor, out: Tensor) -> None:
    half = values.shape[3] // 2
    first, second = values[..., :half], values[..., half:]
    torch.mul(first, cos, out=out[..., :half]).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=out[..., half:]).addcmul_(first, sin)
