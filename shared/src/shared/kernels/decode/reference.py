"""Attention of new tokens over their prompts and over what is their own, in plain torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from shared.kernels.decode.slots import Places

__all__ = ["attend"]


def attend(
    qkv: Tensor, cos: Tensor, sin: Tensor, prompt: Tensor, own: Tensor, places: Places
) -> Tensor:
    """One softmax over both parts, laid out beside one another; in float32 at least."""
    kv_heads, dim = prompt.shape[2:4]
    first, second = qkv[:, :-kv_heads].chunk(2, -1)
    cos, sin = cos[:, None], sin[:, None]
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
    q, key = turned[:, :-kv_heads], turned[:, -kv_heads:]
    own[0][places.slots, :, :, places.made] = key
    own[1][places.slots, :, :, places.made] = qkv[:, -kv_heads:]
    wide = torch.promote_types(qkv.dtype, torch.float32)
    keys, values = torch.cat([prompt[:, places.prompts], own[:, places.slots]], -1).to(wide)
    in_prompt = torch.arange(prompt.shape[4], device=own.device) < places.prompt_lengths[:, None]
    is_made = torch.arange(own.shape[4], device=own.device) <= places.made[:, None]
    is_seen = torch.cat([in_prompt, is_made], 1)[:, None, None]
    score = q.to(wide).unflatten(1, (kv_heads, -1)) @ keys * dim**-0.5
    weight = score.masked_fill(~is_seen, -torch.inf).softmax(-1)
    # What lies beyond may be anything that was in memory, even no number.
    values = values.masked_fill(~is_seen, 0)
    return (weight @ values.transpose(-1, -2)).flatten(1, 2).to(qkv.dtype)
