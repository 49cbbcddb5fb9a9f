"""Products with weights of 3, 4 or 8 bits, and these weights themselves.

A weight matrix [out, in] is cut along `in` into groups that share a float16 scale and an integer
zero point: weight = (code - zero) * scale, with 0 <= code, zero < 2**bits. That is the usual
asymmetric integer form, so other engines read the same codes, scales and zero points. Rows are
output channels; `shared.kernels.quantize` packs messages instead, with float zero points.

Two forms of use: `matmul` computes from the packed weights, which pays for few tokens, when reading
weights takes the time; `unpack` writes them out for an ordinary product.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from shared.errors import ConfigError, DataError
from shared.kernels.registry import select
from shared.kernels.weight_matmul.layout import (
    codes_from_slots,
    pack_slots,
    slots_from_codes,
    unpack_slots,
)
from shared.kernels.weight_matmul.packed_weight import PackedWeight, packed_bytes

__all__ = [
    "BITS",
    "PackedWeight",
    "codes",
    "from_codes",
    "matmul",
    "pack",
    "packed_bytes",
    "unpack",
]

BITS = (3, 4, 8)
"""Widths of codes."""

_MIN_SCALE = 2.0**-24  # the smallest float16
_MAX_SCALE = 65504.0


def pack(weight: Float[Tensor, "out in"], bits: int, *, group_size: int = 128) -> PackedWeight:
    """Rounds a weight to its nearest codes; 0 is always exact.

    A group's step is its range, widened to hold 0, over 2**bits - 1, rounded up to float16. A group of
    zeros is exact. Values below half of 2**-24 become 0.

    Args:
        weight: any float type; computed in float32.
        bits: 3, 4 or 8.
        group_size: columns that share a scale, at least 1; the last group may have fewer.

    Raises:
        ConfigError: bits or group_size is none of those above.
        DataError: a weight is NaN or infinite, or a group's step exceeds float16; the message
            says where.
    """
    _check_settings(bits, group_size)
    rows, columns = weight.shape
    levels = (1 << bits) - 1
    x = weight.detach().to(torch.float32)
    _check_finite(x)
    groups = -(-columns // group_size)
    if groups * group_size > columns:
        x = torch.nn.functional.pad(x, (0, groups * group_size - columns))
    x = x.reshape(rows, groups, group_size)
    # Divided before they are subtracted: the range of large weights may exceed float32.
    low, high = (bound.clamp_(max=0) / levels for bound in (x.amin(2), -x.amax(2)))
    step = -high - low
    if step.numel() and float(step.max()) > _MAX_SCALE:
        row, group = divmod(int(step.argmax()), groups)
        raise DataError(
            f"expected steps of at most {_MAX_SCALE:.0f} (float16), got {float(step.max()):.4g} in "
            f"row {row}, columns from {group * group_size}; scale the weights down"
        )
    scale = step.to(torch.float16)
    # Up, so that the codes reach as far as the weights: to float16 below 2**-14 little is nearest.
    short = scale.to(torch.float32) < step
    scale = (scale.view(torch.int16) + short).view(torch.float16).clamp_(min=_MIN_SCALE)
    wide = scale.to(torch.float32)
    zero = (-low * levels / wide).round_().clamp_(max=levels)
    found = (x / wide[..., None]).round_().add_(zero[..., None]).clamp_(0, levels)
    found = found.to(torch.uint8).view(rows, -1)[:, :columns]
    return from_codes(found, scale, zero.to(torch.uint8), bits, group_size=group_size)


def from_codes(
    codes: UInt8[Tensor, "out in"],
    scale: Float[Tensor, "out groups"],
    zero: Tensor,
    bits: int,
    *,
    group_size: int = 128,
) -> PackedWeight:
    """Packs codes that were chosen elsewhere.

    Args:
        codes: below 2**bits.
        scale: step of each group; rounded to float16.
        zero: code of 0 in each group [out, groups], of any integer type, below 2**bits.
        bits: 3, 4 or 8.
        group_size: columns that share a scale.

    Raises:
        ConfigError: bits or group_size is none of those above.
        DataError: a shape does not fit, a code or zero point needs more bits, or a scale is not
            finite in float16.
    """
    _check_settings(bits, group_size)
    rows, columns = codes.shape
    shape = (rows, -(-columns // group_size))
    if tuple(scale.shape) != shape or tuple(zero.shape) != shape:
        raise DataError(
            f"expected scale and zero of {list(shape)} for codes {list(codes.shape)} in groups of "
            f"{group_size}, got {list(scale.shape)} and {list(zero.shape)}"
        )
    for name, values in (("codes", codes), ("zero points", zero)):
        low, high = (int(bound) for bound in values.aminmax()) if values.numel() else (0, 0)
        if low < 0 or high >> bits:
            raise DataError(f"expected {name} of {bits} bits, got {low} to {high}")
    half = scale.to(torch.float16)
    if not bool(half.isfinite().all()):
        raise DataError("expected scales that are finite in float16, got one that is not")
    return PackedWeight(
        data=pack_slots(slots_from_codes(codes, group_size), bits),
        scale=half.contiguous(),
        zero=zero.to(torch.uint8).contiguous(),
        bits=bits,
        in_features=columns,
        group_size=group_size,
    )


def codes(packed: PackedWeight) -> UInt8[Tensor, "out in"]:
    """The codes, one a byte, in the order of the weight's columns."""
    slots = unpack_slots(packed.data, packed.bits)
    return codes_from_slots(slots, packed.in_features, packed.group_size)


def unpack(packed: PackedWeight, dtype: torch.dtype = torch.float32) -> Float[Tensor, "out in"]:
    """The weights (code - zero) * scale, exact in float32, rounded once to other types.

    Raises:
        ConfigError: dtype is not float32, bfloat16 or float16.
    """
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ConfigError(f"expected float32, bfloat16 or float16, got {dtype}")
    out = torch.empty(
        packed.out_features, packed.in_features, dtype=dtype, device=packed.data.device
    )
    if out.numel():
        select("weight_matmul", out.device).unpack(packed, out)
    return out


def matmul(x: Float[Tensor, "*batch in"], packed: PackedWeight) -> Float[Tensor, "*batch out"]:
    """x times the transposed weight, sums in float32, the result in x's type; not differentiable.

    A row of the result depends on its row of x alone, whatever stands beside it. The CPU form rounds
    x to 31 bits of fixed point a group (bfloat16 and float16: 16 bits), far below the type's own
    rounding of the result.

    Raises:
        DataError: x has another number of columns, or lies on another device.
    """
    if x.shape[-1] != packed.in_features or x.device != packed.data.device:
        raise DataError(
            f"expected x of {packed.in_features} columns on {packed.data.device}, got "
            f"{list(x.shape)} on {x.device}"
        )
    rows = x.detach().reshape(-1, packed.in_features)
    out = torch.empty(len(rows), packed.out_features, dtype=x.dtype, device=x.device)
    if rows.numel() and out.numel():
        if x.dtype == torch.float64:
            from shared.kernels.weight_matmul import reference as form
        else:
            form = select("weight_matmul", x.device)
        form.matmul(rows, packed, out)
    else:
        out.zero_()
    return out.view(*x.shape[:-1], packed.out_features)


def _check_settings(bits: int, group_size: int) -> None:
    if bits not in BITS:
        raise ConfigError(f"bits: expected one of {BITS}, got {bits!r}")
    if group_size < 1:
        raise ConfigError(f"group_size: expected at least 1, got {group_size}")


def _check_finite(weight: Tensor) -> None:
    finite = weight.isfinite()
    if not bool(finite.all()):
        row, column = (int(place) for place in (~finite).nonzero()[0])
        raise DataError(
            f"expected finite weights, got {float(weight[row, column])} in row {row}, column "
            f"{column} ({int((~finite).sum())} in all); repair the checkpoint"
        )
