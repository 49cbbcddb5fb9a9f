"""Unpacked weights, and products with them, in plain torch: the definition."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from shared.kernels.weight_matmul.layout import codes_from_slots, unpack_slots

if TYPE_CHECKING:
    from shared.kernels.weight_matmul.packed_weight import PackedWeight

__all__ = ["matmul", "unpack"]


def unpack(packed: PackedWeight, out: Tensor) -> None:
    """Writes (code - zero) * scale to `out` [out, in]."""
    slots = unpack_slots(packed.data, packed.bits)
    codes = codes_from_slots(slots, packed.in_features, packed.group_size)
    group = torch.arange(packed.in_features, device=codes.device) // packed.group_size
    zero, scale = packed.zero.to(torch.float32), packed.scale.to(torch.float32)
    out.copy_((codes.to(torch.float32) - zero[:, group]) * scale[:, group])


def matmul(x: Tensor, packed: PackedWeight, out: Tensor) -> None:
    """Writes x [tokens, in] times the transposed weight to `out` [tokens, out]."""
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    weight = torch.empty(packed.out_features, packed.in_features, dtype=wide, device=x.device)
    unpack(packed, weight)
    out.copy_(x.to(wide) @ weight.t())
