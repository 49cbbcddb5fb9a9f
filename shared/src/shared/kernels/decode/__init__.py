"""Attention of one new token a place, over the keys of its prompt and over its own.

Samples of a prompt share its keys and values, which lie in memory once; what a sample has made itself
lies at its place. Turning queries and keys by their positions, keeping the new key and value, and the
attention are one pass. Not differentiable.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from shared.errors import DataError
from shared.kernels.decode.slots import Places
from shared.kernels.registry import select

__all__ = ["Places", "attend"]


def attend(
    qkv: Float[Tensor, "places heads_and_2_kv_heads dim"],
    cos: Float[Tensor, "places half"],
    sin: Float[Tensor, "places half"],
    prompt: Float[Tensor, "2 prompts kv_heads dim prompt_positions"],
    own: Float[Tensor, "2 slots kv_heads dim positions"],
    places: Places,
) -> Float[Tensor, "places heads dim"]:
    """softmax(q k / sqrt(dim)) v over a prompt's positions and a place's own, the new one included.

    A head's first half and second half are the two coordinates of its pairs. float64 takes the
    reference, and so do half types on the CPU. Indices and lengths are trusted: they are the caller's own.

    Args:
        qkv: heads of queries, keys and values, one after another, not turned yet.
        cos, sin: of the new tokens' angles.
        prompt: keys, then values, of the prompts; turned.
        own: keys, then values, of the slots; the new ones are written to it.
        places: what each row of qkv reads.

    Raises:
        DataError: a shape does not fit.
    """
    num_kv_heads, dim = prompt.shape[2:4]
    num_heads = qkv.shape[1] - 2 * num_kv_heads
    if (
        own.shape[2:4] != prompt.shape[2:4]
        or (qkv.shape[2], 2 * cos.shape[1]) != (dim, dim)
        or num_heads < 1
        or num_heads % num_kv_heads
    ):
        raise DataError(
            f"expected queries of a multiple of {num_kv_heads} heads of {dim}, two such heads more "
            f"a key head, and {dim // 2} angles, got {list(qkv.shape)} and {list(cos.shape)}, with "
            f"{list(own.shape)} of one's own"
        )
    is_cpu = qkv.device.type == "cpu"
    if qkv.dtype == torch.float64 or (is_cpu and qkv.dtype != torch.float32):
        from shared.kernels.decode import reference as form
    else:
        form = select("decode", qkv.device)
    return form.attend(qkv, cos, sin, prompt, own, places)
