"""Attention of a piece of a document to another piece, with what is needed to merge pieces.

On the CPU aten's flash attention computes it, which returns the logarithms of the sums of its exponents
too; on a GPU its counterpart there, and whole documents by one call of torch's varlen_attn. Merging parts
by these sums is exact (ring attention, arXiv 2310.01889), and the backward pass of a part takes the whole
row's output and sum.
"""

from __future__ import annotations

import functools
from itertools import accumulate
from typing import Any

import torch
from jaxtyping import Float, Int32
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.attention.varlen import varlen_attn

from shared.errors import ConfigError

__all__ = ["attend_documents", "attend_piece", "attend_piece_backward", "attend_varlen", "wide"]


def wide(dtype: torch.dtype) -> torch.dtype:
    """The type in which parts are added up."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def attend_piece(
    q: Float[Tensor, "heads queries dim"],
    k: Float[Tensor, "kv_heads keys dim"],
    v: Float[Tensor, "kv_heads keys dim"],
    scale: float,
    *,
    is_causal: bool,
) -> tuple[Float[Tensor, "heads queries dim"], Float[Tensor, "heads queries"]]:
    """Output, and logarithms of the sums of exponents, of queries over some of their keys.

    Args:
        q, k, v: query heads are a multiple of the key heads, which they share in order.
        scale: of the products.
        is_causal: whether queries and keys are the same tokens, none of which sees later ones.

    Raises:
        ConfigError: on a GPU, values of another type than 16 bits.
    """
    if q.is_cuda:
        _check_narrow(q)
    k, v = _repeat(k, q), _repeat(v, q)
    if q.is_cuda:
        out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
            q[None], k[None], v[None], 0.0, is_causal, False, scale=scale
        )
    else:
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q[None], k[None], v[None], 0.0, is_causal, scale=scale
        )
    return out[0], lse[0]


def attend_piece_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    *,
    is_causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of a part's queries, keys and values.

    Args:
        grad: of the whole rows' output.
        q, k, v: as in `attend_piece`.
        out, lse: of the whole rows, over all of their keys.
        scale: of the products.
        is_causal: as in `attend_piece`.
    """
    heads = k.shape[0]
    wide_k, wide_v = _repeat(k, q), _repeat(v, q)
    if q.is_cuda:
        none = torch.zeros((), dtype=torch.int64, device=q.device)
        grads = torch.ops.aten._scaled_dot_product_flash_attention_backward(
            grad[None], q[None], wide_k[None], wide_v[None], out[None], lse[None], None, None,
            q.shape[1], k.shape[1], 0.0, is_causal, none, none, scale=scale,
        )  # fmt: skip
    else:
        grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad[None], q[None], wide_k[None], wide_v[None], out[None], lse[None], 0.0, is_causal,
            scale=scale,
        )  # fmt: skip
    of_q, of_k, of_v = (one[0] for one in grads)
    return of_q, _fold(of_k, heads), _fold(of_v, heads)


def attend_documents(
    q: Float[Tensor, "heads tokens dim"],
    k: Float[Tensor, "kv_heads tokens dim"],
    v: Float[Tensor, "kv_heads tokens dim"],
    lengths: tuple[int, ...],
    scale: float,
) -> Float[Tensor, "heads tokens dim"]:
    """Causal attention inside each document of a packed row; differentiable.

    Args:
        q, k, v: all documents' tokens, one document after the other.
        lengths: their tokens, which add up to all.
        scale: of the products.

    Raises:
        ConfigError: on a GPU, values of another type than 16 bits.
    """
    if q.is_cuda:
        return attend_varlen(q, k, v, lengths, scale)
    return _Documents.apply(q, k, v, lengths, scale)


def attend_varlen(
    q: Float[Tensor, "heads tokens dim"],
    k: Float[Tensor, "kv_heads tokens dim"],
    v: Float[Tensor, "kv_heads tokens dim"],
    lengths: tuple[int, ...],
    scale: float,
) -> Float[Tensor, "heads tokens dim"]:
    """The same by torch's varlen_attn: one kernel for all documents, on a GPU.

    Raises:
        ConfigError: values of another type than 16 bits.
    """
    _check_narrow(q)
    ends, longest = _ends(lengths, q.device), max(lengths)
    found = varlen_attn(
        q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), ends, ends, longest, longest, scale=scale, window_size=(-1, 0),
        enable_gqa=q.shape[0] != k.shape[0],
    )  # fmt: skip
    assert isinstance(found, Tensor)
    return found.transpose(0, 1)


def _check_narrow(q: Tensor) -> None:
    if q.dtype not in (torch.float16, torch.bfloat16):
        raise ConfigError(
            f"attention by document on a GPU: expected float16 or bfloat16, got {q.dtype}; load the model "
            f"in bfloat16, or train it under torch.autocast"
        )


@functools.lru_cache(maxsize=16)  # as every layer of a micro-batch asks
def _ends(lengths: tuple[int, ...], device: torch.device) -> Int32[Tensor, " ends"]:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)


class _Documents(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, lengths: tuple[int, ...], scale: float
    ) -> Tensor:
        out, lse = torch.empty_like(q), q.new_empty(q.shape[:2], dtype=wide(q.dtype))
        begin = 0
        for length in lengths:
            part = slice(begin, begin + length)
            out[:, part], lse[:, part] = attend_piece(
                q[:, part], k[:, part], v[:, part], scale, is_causal=True
            )
            begin += length
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.lengths, ctx.scale = lengths, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (grad,) = grads
        q, k, v, out, lse = ctx.saved_tensors
        found = tuple(torch.empty_like(one) for one in (q, k, v))
        begin = 0
        for length in ctx.lengths:
            part = slice(begin, begin + length)
            of_part = attend_piece_backward(
                grad[:, part], q[:, part], k[:, part], v[:, part], out[:, part], lse[:, part],
                ctx.scale, is_causal=True,
            )  # fmt: skip
            for whole, one in zip(found, of_part, strict=True):
                whole[:, part] = one
            begin += length
        return *found, None, None


def _repeat(keys: Tensor, q: Tensor) -> Tensor:
    """Key heads as many as query heads."""
    times = q.shape[0] // keys.shape[0]
    return keys if times == 1 else keys.repeat_interleave(times, 0)


def _fold(grad: Tensor, heads: int) -> Tensor:
    """Gradients of repeated heads, added up."""
    return grad if grad.shape[0] == heads else grad.unflatten(0, (heads, -1)).sum(1)
