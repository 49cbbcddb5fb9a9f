"""Seconds of operations on a device that is not there: by its data sheet, from their shapes alone."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from shared.topology.device import Device

__all__ = ["Roofline", "Seconds"]

_aten = torch.ops.aten
_CONTRACTED = {
    _aten.mm.default: 0, _aten.bmm.default: 0, _aten.addmm.default: 1, _aten.baddbmm.default: 1
}  # fmt: skip
"""Matrix products: which argument's last dimension is summed over."""

_ATTENTION = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default: 0,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default: 1,
}
"""Attention: which argument is the query; keys and values follow it."""

_BACKWARD_PRODUCTS = 5
"""Products of attention's backward, which computes the scores again; its forward has two."""

PRODUCT_SHARE = 0.7
ATTENTION_SHARE = 0.73
ATTENTION_BACKWARD_SHARE = 0.63
MEMORY_SHARE = 0.8


@dataclass(frozen=True, slots=True)
class Seconds:
    """Seconds of some operations.

    Attributes:
        attention: of attention, which grow with the square of the length.
        other: of everything else.
    """

    attention: float = 0.0
    other: float = 0.0

    def __add__(self, more: Seconds) -> Seconds:
        return Seconds(self.attention + more.attention, self.other + more.other)

    def __sub__(self, less: Seconds) -> Seconds:
        return Seconds(self.attention - less.attention, self.other - less.other)


class Roofline(TorchDispatchMode):
    """Adds up seconds of all operations, fake ones too, while the mode is on.

    A product takes its operations over 0.7 of the device's peak: an assumption, between what large
    products reach on an A100 and on an H100. Attention takes its operations, half of them as it is causal,
    over 0.73 of the peak forward and 0.63 backward: the most that FlashAttention-2 (arXiv 2307.08691)
    reports on an A100, at long lengths; small ones reach less. All else takes the bytes that it reads
    and writes over 0.8 of the memory's bandwidth, each operation by itself, as eager torch runs them.

    Attributes:
        total: of all operations so far.
    """

    def __init__(self, device: Device) -> None:
        """Takes the device's data sheet."""
        super().__init__()
        self.total = Seconds()
        self._device = device

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Called by torch for every operation while the mode is on."""
        out = func(*args, **(kwargs or {}))
        if func in _CONTRACTED:
            summed = args[_CONTRACTED[func]].shape[-1]
            rate = self._peak(out) * PRODUCT_SHARE
            self.total += Seconds(other=2 * out.numel() * summed / rate)
        elif func in _ATTENTION:
            self.total += Seconds(attention=self._attention_s(func, args))
        else:
            num_bytes = _moved_bytes(func, args, kwargs, out)
            rate = self._device.memory_bytes_per_s * MEMORY_SHARE
            self.total += Seconds(other=num_bytes / rate)
        return out

    def _attention_s(self, func: Any, args: tuple[Any, ...]) -> float:
        at = _ATTENTION[func]
        query, key = args[at], args[at + 1]
        product = 2 * prod(query.shape) * key.shape[2] / 2  # causal: half of all pairs
        if at:
            return _BACKWARD_PRODUCTS * product / (self._peak(query) * ATTENTION_BACKWARD_SHARE)
        return 2 * product / (self._peak(query) * ATTENTION_SHARE)

    def _peak(self, tensor: Tensor) -> float:
        device = self._device
        return device.flops_per_s if tensor.dtype.itemsize <= 2 else device.flops_fp32_per_s


def _moved_bytes(func: Any, args: Any, kwargs: Any, out: Any) -> int:
    """Bytes that an element-wise operation reads and writes; none for views."""
    given = [one for one in tree_iter((args, kwargs)) if isinstance(one, Tensor)]
    made = [one for one in tree_iter(out) if isinstance(one, Tensor)]
    known = {one.untyped_storage()._cdata for one in given}
    if not func._schema.is_mutable and all(one.untyped_storage()._cdata in known for one in made):
        return 0
    if "empty" in func.name():
        return 0
    return sum(min(one.nbytes, one.untyped_storage().nbytes()) for one in (*given, *made))
