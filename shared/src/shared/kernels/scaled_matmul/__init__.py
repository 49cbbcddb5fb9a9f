"""Products of matrices whose rows are int8 or fp8 codes with a scale each.

`quantize_rows` rounds each row to codes: symmetric int8 with scale absmax / 127, or fp8 (e4m3) with
the smallest power of two that brings the row within 448, so that the mantissa's grid stays that of
the format. `scaled_matmul` multiplies two such matrices, accumulates exactly (int8) or in float32
(fp8), and applies both scales and the bias before it writes a result once.

Rounding is to nearest, ties to even. All forms give the same codes and scales to the bit. A row of
zeros has scale 1. A row that holds NaN or an infinity has scale NaN and codes 0: its products are
NaN.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from shared.errors import ConfigError, DataError
from shared.kernels.registry import select
from shared.kernels.scaled_matmul.reference import FP8_MAX, INT8_MAX

__all__ = ["DTYPES", "FP8_MAX", "INT8_MAX", "ScaledRows", "quantize_rows", "scaled_matmul"]

DTYPES = (torch.int8, torch.float8_e4m3fn)
# 127 * 127 * columns must fit an int32.
_MAX_COLUMNS = (2**31 - 1) // 127**2


class ScaledRows(NamedTuple):
    """A matrix as codes and a scale a row.

    Attributes:
        codes: int8 or float8_e4m3fn [rows, columns].
        scale: float32 [rows]; an element is its code times its row's scale.
    """

    codes: Tensor
    scale: Tensor


def quantize_rows(
    x: Float[Tensor, "rows columns"],
    dtype: torch.dtype,
    *,
    scales: str = "row",
) -> ScaledRows:
    """Rounds a matrix to codes; not differentiable.

    Args:
        x: any float type; computed in float32.
        dtype: torch.int8 or torch.float8_e4m3fn.
        scales: "row", one scale a row, or "tensor", the same for all rows.

    Raises:
        ConfigError: dtype or scales is none of those above.
    """
    if dtype not in DTYPES:
        raise ConfigError(f"dtype: expected torch.int8 or torch.float8_e4m3fn, got {dtype}")
    if scales not in ("row", "tensor"):
        raise ConfigError(f"scales: expected 'row' or 'tensor', got {scales!r}")
    x = x.detach().to(torch.float32).contiguous()
    codes = torch.empty(x.shape, dtype=dtype, device=x.device)
    scale = torch.ones(len(x), dtype=torch.float32, device=x.device)
    if x.numel():
        largest = None
        if scales == "tensor":
            low, high = x.aminmax()
            # Zeros alone have the maximum -0.0, whose sign bit would count as NaN.
            largest = torch.maximum(-low, high).abs().expand(len(x)).contiguous()
        select("scaled_matmul", x.device).quantize_rows(x, largest, codes, scale)
    return ScaledRows(codes, scale)


def scaled_matmul(
    a: ScaledRows,
    b: ScaledRows,
    bias: Float[Tensor, " b_rows"] | None = None,
    *,
    dtype: torch.dtype = torch.float32,
) -> Float[Tensor, "a_rows b_rows"]:
    """Multiplies a by b transposed: a linear layer's form; not differentiable.

    Args:
        a: codes [a_rows, columns].
        b: codes of the same type and number of columns [b_rows, columns].
        bias: added to each row of the result.
        dtype: type of the result; scales and bias are applied in float32.

    Raises:
        DataError: types, columns or devices differ, scales or bias have another length, or int8 rows
            have more columns than an int32 sum has room for.
    """
    (rows, columns), num_b = a.codes.shape, len(b.codes)
    if a.codes.dtype != b.codes.dtype or columns != b.codes.shape[1]:
        raise DataError(
            f"expected codes of one type and number of columns, got {a.codes.dtype} "
            f"{list(a.codes.shape)} and {b.codes.dtype} {list(b.codes.shape)}"
        )
    vectors = {"scale of a": (a.scale, rows), "scale of b": (b.scale, num_b), "bias": (bias, num_b)}
    for name, (vector, length) in vectors.items():
        if vector is not None and vector.shape != (length,):
            raise DataError(f"expected a {name} of {length} elements, got {list(vector.shape)}")
    devices = {each.device for each in (*a, *b, bias) if each is not None}
    if len(devices) > 1:
        raise DataError(f"expected one device, got {', '.join(sorted(map(str, devices)))}")
    if a.codes.dtype == torch.int8 and columns > _MAX_COLUMNS:
        raise DataError(
            f"expected int8 rows of at most {_MAX_COLUMNS} columns, whose sums fit 32 bits, got "
            f"{columns}; split the columns"
        )
    out = torch.zeros(rows, num_b, dtype=dtype, device=a.codes.device)
    if out.numel() and columns:
        form = select("scaled_matmul", out.device)
        factors = [each.contiguous() for each in (*a, *b)]
        form.scaled_matmul(*factors, bias, out)
    elif bias is not None:
        out += bias
    return out
