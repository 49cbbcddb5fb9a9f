"""Tensors as plain memory: raw bytes of those without gaps, and the same views over other memory."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

__all__ = ["Geometry", "flat_bytes", "is_dense", "raw_bytes"]


@dataclass(frozen=True, slots=True)
class Geometry:
    """How a tensor lies in memory.

    Attributes:
        shape, stride, dtype: the tensor's.
        num_bytes: of its elements.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    num_bytes: int

    @classmethod
    def of(cls, tensor: Tensor) -> Geometry:
        """The geometry of a tensor."""
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.nbytes)

    def view(self, memory: Tensor) -> Tensor:
        """The tensor of this geometry over memory, a uint8 tensor of at least `num_bytes`.

        It has a storage of its own, as what it stands for had: with a version of its own, and an offset of 0 that
        `as_strided` counts from.
        """
        begin = int(memory.storage_offset())
        storage = memory.untyped_storage()[begin : begin + self.num_bytes]
        tensor = torch.empty(0, dtype=self.dtype, device=memory.device)
        return tensor.set_(storage, 0, self.shape, self.stride)


def is_dense(tensor: Tensor) -> bool:
    """Whether the tensor's elements fill one stretch of memory, in whichever order of dimensions."""
    expected = 1
    for size, stride in sorted(zip(tensor.shape, tensor.stride(), strict=True), key=lambda x: x[1]):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return tensor.numel() > 0 and tensor.layout == torch.strided


def flat_bytes(tensor: Tensor, num_bytes: int) -> Tensor:
    """The first bytes of a dense tensor's memory, uint8; nothing is copied."""
    flat = torch.as_strided(tensor.detach(), (tensor.numel(),), (1,), tensor.storage_offset())
    return flat.view(torch.uint8)[:num_bytes]


def raw_bytes(tensor: Tensor, num_bytes: int) -> np.ndarray:
    """The first bytes of a dense tensor's memory in RAM; nothing is copied."""
    return flat_bytes(tensor, num_bytes).numpy()
