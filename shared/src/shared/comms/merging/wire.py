"""How rows of several tensors travel: one row of bytes for each, all tensors beside one another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from shared.errors import ConfigError

__all__ = ["RowFormat"]

_WIRES = (None, "float32", "bfloat16", "int8")
# Fewest numbers a row that are narrowed below float32: fewer save little. Narrower tensors of a state,
# as the maxima of a softmax over many heads, may be exponents.
_MIN_WIDTH = 16
_PARAM_BYTES = 8


@dataclass(frozen=True, slots=True)
class _Column:
    """What one tensor adds to a row of bytes.

    Attributes:
        shape: The tensor's, without its rows.
        dtype: The tensor's.
        sent: Type on the way; torch.int8: codes, behind their zero point and scale.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    sent: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes a row."""
        params = _PARAM_BYTES if self.is_quantized else 0
        return prod(self.shape) * self.sent.itemsize + params

    @property
    def is_quantized(self) -> bool:
        """Whether floats travel as codes."""
        return self.sent == torch.int8 and self.dtype.is_floating_point

    def encode(self, tensor: Tensor) -> Tensor:
        """Rows of bytes."""
        rows = tensor.reshape(len(tensor), prod(self.shape))
        if self.is_quantized:
            return _quantize(rows)
        return rows.to(self.sent).contiguous().view(torch.uint8)

    def decode(self, data: Tensor) -> Tensor:
        """The tensor of rows of bytes, which lie beside one another."""
        if not data.numel():
            return torch.empty(len(data), *self.shape, dtype=self.dtype, device=data.device)
        if self.is_quantized:
            zero, scale = _copy(data[:, :_PARAM_BYTES]).view(torch.float32).split(1, 1)
            rows = (data[:, _PARAM_BYTES:] * scale + zero).to(self.dtype)
        else:
            rows = data.view(self.sent).to(self.dtype)
        return rows.reshape(len(data), *self.shape)


def _copy(data: Tensor) -> Tensor:
    """A copy, aligned for any type; of one row, `contiguous` would give the row itself."""
    return data.clone(memory_format=torch.contiguous_format)


class RowFormat:
    """Encodes rows of some tensors as rows of bytes, each row on its own.

    Args:
        tensors: with the same number of rows; others of these types and row shapes can be encoded
            too.
        wire: type of floats on the way, or None.

    Raises:
        ConfigError: `wire` is unknown.
    """

    def __init__(self, tensors: Sequence[Tensor], wire: str | None) -> None:
        if wire not in _WIRES:
            raise ConfigError(f"wire must be one of {', '.join(map(str, _WIRES))}, got {wire!r}")
        widest = max((prod(t.shape[1:]) for t in tensors if t.is_floating_point()), default=0)
        self._columns = [
            _Column(tuple(tensor.shape[1:]), tensor.dtype, _sent_type(tensor, wire, widest))
            for tensor in tensors
        ]

    def encode(self, tensors: Sequence[Tensor]) -> Tensor:
        """The tensors as uint8 [rows, bytes]."""
        parts = [
            column.encode(tensor) for column, tensor in zip(self._columns, tensors, strict=True)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)

    def decode(self, message: Tensor) -> list[Tensor]:
        """The tensors of a message, or of some of its rows."""
        parts = message.split([column.num_bytes for column in self._columns], 1)
        if len(parts) > 1:
            parts = [_copy(part) for part in parts]
        return [column.decode(part) for column, part in zip(self._columns, parts, strict=True)]


def _sent_type(tensor: Tensor, wire: str | None, widest: int) -> torch.dtype:
    own, width = tensor.dtype, prod(tensor.shape[1:])
    if wire is None or not own.is_floating_point:
        return own
    narrow = getattr(torch, wire if width >= _MIN_WIDTH and width == widest else "float32")
    return narrow if narrow.itemsize < own.itemsize else own


def _quantize(rows: Tensor) -> Tensor:
    """Each row's smallest number, the step between codes, and a code from 0 to 255 a number."""
    rows = rows.float()
    low, high = rows.aminmax(dim=1, keepdim=True)
    # A row of one value, infinite or not, is its zero point.
    scale = torch.where(low == high, 0, (high - low) / 255)
    codes = ((rows - low) / scale).round().nan_to_num(0).clamp(0, 255)
    params = torch.cat([low, scale], 1)
    return torch.cat([params.view(torch.uint8), codes.to(torch.uint8)], 1)
