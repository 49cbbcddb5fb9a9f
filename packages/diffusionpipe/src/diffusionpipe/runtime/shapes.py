"""Shapes of the values that travel, as functions of the number of samples."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shared.errors import DataError

__all__ = ["Shapes", "ValueShape", "check_shape", "pack", "unpack"]


@dataclass(frozen=True, slots=True)
class ValueShape:
    """The shape of a value, each dimension linear in the number of samples.

    Most values have a row a sample. Some have several (pairs of a preference) or none (positions
    that all samples share).

    Attributes:
        fixed: size of each dimension without samples.
        per_sample: what a sample adds to each dimension.
        dtype: of the value.
    """

    fixed: tuple[int, ...]
    per_sample: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def between(cls, single: Tensor, pair: Tensor) -> ValueShape:
        """The shape of a value that was seen for one sample and for two.

        Raises:
            DataError: the two differ in their number of dimensions or in type.
        """
        if single.dim() != pair.dim() or single.dtype != pair.dtype:
            raise DataError(
                f"expected a value of one type and number of dimensions, got {single.dtype} "
                f"{list(single.shape)} for one sample and {pair.dtype} {list(pair.shape)} for two; do "
                "not let them depend on the number of samples"
            )
        per_sample = tuple(b - a for a, b in zip(single.shape, pair.shape, strict=True))
        fixed = tuple(a - step for a, step in zip(single.shape, per_sample, strict=True))
        return cls(fixed, per_sample, single.dtype)

    @property
    def has_rows(self) -> bool:
        """Whether row i is of sample i, so that rows can be cut out."""
        return bool(self.fixed) and not self.fixed[0] and self.per_sample == (
            1, *(0 for _ in self.fixed[1:]),
        )  # fmt: skip

    def of(self, num_samples: int) -> tuple[int, ...]:
        """The shape for a number of samples."""
        sizes = zip(self.fixed, self.per_sample, strict=True)
        return tuple(fixed + step * num_samples for fixed, step in sizes)


@dataclass(frozen=True, slots=True)
class Shapes:
    """Shapes of a job's values.

    Attributes:
        values: of what layers write, by backbone and key.
        frozen: of frozen outputs, by name.
        device: where values lie.
    """

    values: Sequence[Mapping[str, ValueShape]]
    frozen: Mapping[str, ValueShape]
    device: torch.device

    def fill_frozen(self, values: Mapping[str, Tensor], num_samples: int) -> dict[str, Tensor]:
        """Adds frozen outputs that are missing: nothing here should depend on them.

        They are NaN, so that what depends on them after all has a loss that is noticed; zeros where
        the type has none.
        """
        return {
            name: values[name] if name in values else self._make_unused(shape, num_samples)
            for name, shape in self.frozen.items()
        }

    def _make_unused(self, shape: ValueShape, num_samples: int) -> Tensor:
        value = torch.nan if shape.dtype.is_floating_point else 0
        sizes = shape.of(num_samples)
        return torch.full(sizes, value, dtype=shape.dtype, device=self.device)


def check_shape(label: str, value: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Checks that a value looks as in the first batch, by which buffers and messages were laid out.

    Raises:
        DataError: it does not; the error begins with the label.
    """
    if value.shape != shape or value.dtype != dtype:
        raise DataError(
            f"{label} of shape {list(shape)} and {dtype}, as in the first batch, got "
            f"{list(value.shape)} and {value.dtype}; let shapes not depend on values, as by padding "
            "texts to one length"
        )


def pack(tensors: Sequence[Tensor]) -> Tensor:
    """Joins the bytes of some tensors in one; a single one stays as it is."""
    if len(tensors) == 1:
        return tensors[0].contiguous()
    return torch.cat([tensor.contiguous().view(-1).view(torch.uint8) for tensor in tensors])


def unpack(buffer: Tensor, layout: Sequence[tuple[tuple[int, ...], torch.dtype]]) -> list[Tensor]:
    """Views of a buffer that holds what `pack` has joined.

    Args:
        buffer: uint8 [num_bytes].
        layout: shape and type of each tensor; the types with the most bytes come first, so that
            each tensor begins at a multiple of its type's bytes.
    """
    tensors, offset = [], 0
    for shape, dtype in layout:
        num_bytes = math.prod(shape) * dtype.itemsize
        tensors.append(buffer[offset : offset + num_bytes].view(dtype).view(shape))
        offset += num_bytes
    return tensors
