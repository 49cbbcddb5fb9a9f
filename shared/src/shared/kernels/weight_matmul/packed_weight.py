"""A weight matrix as integer codes."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from shared.kernels.weight_matmul.layout import CHUNK, num_chunks

__all__ = ["PackedWeight", "packed_bytes"]


def packed_bytes(out_features: int, in_features: int, bits: int, *, group_size: int) -> int:
    """Bytes of a weight of this shape: codes with what fills their chunks, scales and zero points."""
    codes = num_chunks(in_features, group_size) * CHUNK * bits // 8
    return out_features * (codes + 3 * -(-in_features // group_size))


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedWeight:
    """A weight matrix in groups of integer codes.

    Attributes:
        data: the codes, uint8 [out, chunks, 16 * bits] as `layout` says: 128 columns a chunk.
        scale: step of each group, float16 [out, groups].
        zero: code that stands for 0 in each group, uint8 [out, groups].
        bits: bits of a code.
        in_features: columns of the weight.
        group_size: columns that share scale and zero point; the last group may have fewer.
    """

    data: Tensor
    scale: Tensor
    zero: Tensor
    bits: int
    in_features: int
    group_size: int

    @property
    def out_features(self) -> int:
        """Rows of the weight."""
        return self.data.shape[0]

    @property
    def num_bytes(self) -> int:
        """Bytes of codes, scales and zero points."""
        return self.data.nbytes + self.scale.nbytes + self.zero.nbytes

    def rows(self, start: int, stop: int) -> PackedWeight:
        """Rows `start` to `stop`, sharing memory."""
        part = slice(start, stop)
        return replace(self, data=self.data[part], scale=self.scale[part], zero=self.zero[part])

    def to(self, device: torch.device | str) -> PackedWeight:
        """The same weight on a device."""
        data, scale, zero = (each.to(device) for each in (self.data, self.scale, self.zero))
        return replace(self, data=data, scale=scale, zero=zero)
