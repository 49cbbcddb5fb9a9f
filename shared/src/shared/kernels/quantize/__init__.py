"""Quantise rows of floats to 1, 2, 4 or 8 bits a column, and back.

Stochastic integer quantisation per row, after "Adaptive Message Quantization and Parallelization
for Distributed Full-graph GNN Training" (arXiv 2306.01381). Departures: the zero point is rounded
down and the scale up to the wire type before anything is quantised, so that the parameters the
receiver reads are the very ones used (rounding them afterwards biases the result by up to a
quarter of a step at 8 bits); noise comes from a counter, not from a state; codes are packed in
planes inside a row, not across rows.

Layout of `data`: with width = packed_width(dim, bits), byte c of a row holds columns c, c + width,
c + 2 * width, ..., the first in its lowest bits. Missing columns of the last planes are 0.

Arithmetic, the same in all three forms, every step rounded by itself in float32:
zero = down(min); scale = up((max - zero) / levels); fixed = int((h - zero) * (65536 / scale) + 0.5);
code = (min(fixed, levels * 65536) + noise) >> 16, with noise a 16-bit integer (32768 for "nearest");
received = code * scale + zero.
"""

from typing import Literal, NamedTuple

import torch
from jaxtyping import Float, Int64, UInt8
from torch import Tensor

from shared.errors import ConfigError, DataError
from shared.kernels.registry import select

__all__ = ["BITS", "Packed", "dequantize", "packed_width", "quantize"]

BITS = (1, 2, 4, 8)
_WIRE_DTYPES = (torch.float32, torch.bfloat16)


class Packed(NamedTuple):
    """Quantised rows as they go on the wire.

    Attributes:
        data: uint8 [n, packed_width(dim, bits)], codes in planes.
        params: float32 or bfloat16 [n, 2], zero point and scale of each row.
        bits: Bits a code.
        dim: Columns a row before packing.
    """

    data: Tensor
    params: Tensor
    bits: int
    dim: int


def packed_width(dim: int, bits: int) -> int:
    """Bytes that a packed row of `dim` columns takes, without its parameters.

    Raises:
        ConfigError: `bits` is not 1, 2, 4 or 8.
    """
    _check_bits(bits)
    return -(-dim // (8 // bits))


def quantize(
    x: Float[Tensor, "rows dim"],
    bits: int,
    *,
    key: int,
    index: Int64[Tensor, " n"] | None = None,
    rounding: Literal["stochastic", "nearest"] = "stochastic",
    wire_dtype: torch.dtype = torch.float32,
    data: UInt8[Tensor, "n width"] | None = None,
    params: Float[Tensor, "n 2"] | None = None,
) -> Packed:
    """Quantise the rows `x[index]` and pack them; not differentiable.

    A row draws its noise from (key, its number in `x`, column), so it draws the same wherever it
    stands in `index`. Constant rows are exact whenever their value is (always, with float32
    parameters): scale 0, every code 0. A row with NaN or infinities, or whose range overflows
    float32, gets NaN parameters and zero codes: test `params`, 2 values a row, not the data.

    Args:
        x: Rows [rows, dim], of any float type; computed in float32.
        bits: 1, 2, 4 or 8.
        key: The noise stream, see `shared.kernels.philox.stream_key`.
        index: Rows to take [n]; None takes all. Bounds are checked on the CPU only.
        rounding: "stochastic" (unbiased up to 2^-17 of a step) or "nearest".
        wire_dtype: float32 or bfloat16, the type of the parameters; must match `params`.
        data: Where the codes go, uint8 [n, packed_width(dim, bits)], at any byte offset.
        params: Where the parameters go, [n, 2] of `wire_dtype`.

    Returns:
        The packed rows; `data` and `params` are the given tensors where they were given.

    Raises:
        ConfigError: Bits, rounding or wire type is none of those above.
        DataError: A shape or type does not fit, or an index lies outside `x`.
    """
    width = packed_width(x.shape[1], bits)
    if rounding not in ("stochastic", "nearest"):
        raise ConfigError(f"expected rounding 'stochastic' or 'nearest', got {rounding!r}")
    if wire_dtype not in _WIRE_DTYPES:
        raise ConfigError(f"expected wire_dtype torch.float32 or torch.bfloat16, got {wire_dtype}")
    num_rows = len(x) if index is None else len(index)
    if data is None:
        data = torch.empty(num_rows, width, dtype=torch.uint8, device=x.device)
    if params is None:
        params = torch.empty(num_rows, 2, dtype=wire_dtype, device=x.device)
    _check_tensor("data", data, (num_rows, width), torch.uint8)
    _check_tensor("params", params, (num_rows, 2), wire_dtype)
    if index is not None:
        _check_index(index, len(x))
    if data.numel() == 0:
        params.zero_()
        return Packed(data, params, bits, x.shape[1])
    # The kernels write whole rows one after another.
    codes, wire = data.contiguous(), params.contiguous()
    with torch.no_grad():
        form = select("quantize", x.device)
        form.quantize(x.detach(), bits, key, index, rounding == "stochastic", codes, wire)
        if codes is not data:
            data.copy_(codes)
        if wire is not params:
            params.copy_(wire)
    return Packed(data, params, bits, x.shape[1])


def dequantize(
    data: UInt8[Tensor, "n width"],
    params: Float[Tensor, "n 2"],
    bits: int,
    dim: int,
    *,
    out: Float[Tensor, "rows dim"] | None = None,
    index: Int64[Tensor, " n"] | None = None,
    dtype: torch.dtype = torch.float32,
) -> Float[Tensor, "rows dim"]:
    """Unpack rows and rebuild their values; not differentiable.

    Args:
        data: Codes as `quantize` packs them, at any byte offset.
        params: Zero point and scale of each row, float32 or bfloat16.
        bits: 1, 2, 4 or 8, as at the sender.
        dim: Columns a row.
        out: Where the values go; may be a slice of the rows of a larger tensor.
        index: The row of `out` for each packed row, no row twice; None: row i to row i. Bounds are
            checked on the CPU only.
        dtype: The type to make when `out` is None.

    Returns:
        The values [n, dim]; `out` where it was given.

    Raises:
        ConfigError: Bits or the type of `params` is none of those above, or `index` comes without
            `out`.
        DataError: A shape does not fit, or an index lies outside `out`.
    """
    if params.dtype not in _WIRE_DTYPES:
        raise ConfigError(f"expected float32 or bfloat16 params, got {params.dtype}")
    if index is not None and out is None:
        raise ConfigError("expected `out`, whose rows `index` names, got None; pass it")
    _check_tensor("data", data, (len(data), packed_width(dim, bits)), torch.uint8)
    _check_tensor("params", params, (len(data), 2), params.dtype)
    if out is None:
        out = torch.empty(len(data), dim, dtype=dtype, device=data.device)
    _check_tensor("out", out, (len(data) if index is None else len(out), dim), out.dtype)
    if index is not None:
        if len(index) != len(data):
            raise DataError(f"expected index [{len(data)}], got [{len(index)}]")
        _check_index(index, len(out))
    if data.numel():
        with torch.no_grad():
            form = select("quantize", data.device)
            form.dequantize(data.contiguous(), params.contiguous(), bits, out.detach(), index)
    return out


def _check_index(index: Tensor, num_rows: int) -> None:
    # On a GPU the check would make the host wait for the device.
    if index.device.type == "cpu" and len(index):
        low, high = (int(bound) for bound in index.aminmax())
        if low < 0 or high >= num_rows:
            raise DataError(f"expected index in [0, {num_rows}), got {low} to {high}")


def _check_bits(bits: int) -> None:
    if bits not in BITS:
        raise ConfigError(f"expected bits to be one of {BITS}, got {bits}")


def _check_tensor(name: str, given: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if tuple(given.shape) != shape or given.dtype != dtype:
        raise DataError(
            f"expected {name} to be {dtype} {list(shape)}, got {given.dtype} {list(given.shape)}"
        )
