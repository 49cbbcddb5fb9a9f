"""Codes of rows in numba, which reads a row once from memory; products by oneDNN.

int8 products run on the processor's integer units. Older ones (no VNNI) add pairs of products in 16
bits, which saturate: there, codes are multiplied in float32. No CPU here multiplies fp8: its codes are
multiplied as bfloat16, which holds them exactly, so fp8 saves memory and no time.
"""

# ruff: noqa: ANN001, ANN202
from functools import cache, partial

import numpy as np
import torch
from torch import Tensor

from shared.kernels.jit import compiled
from shared.kernels.rows import over_rows
from shared.kernels.scaled_matmul import reference

__all__ = ["quantize_rows", "scaled_matmul"]

_MAGNITUDE = np.int32(0x7FFFFFFF)
_INFINITY = np.int32(0x7F800000)
_INT8_MAX = np.float32(reference.INT8_MAX)
_MIN_SCALE = np.float32(reference.MIN_SCALE)


@compiled
def _largest_bits(bits):
    # As integers, magnitudes sort in their order, NaN and infinity on top; float maxima would not
    # become vector instructions.
    largest = np.int32(0)
    for j in range(bits.size):
        largest = max(largest, np.int32(bits[j] & _MAGNITUDE))
    return largest


@compiled
def _code_rows(x, bits, largest, has_largest, codes, scale, start, stop):
    """Fills codes and scales; `bits` is x as int32, `largest` [rows] as int32 too."""
    magnitude = np.empty(1, np.int32)
    value = magnitude.view(np.float32)
    for row in range(start, stop):
        magnitude[0] = largest[row] if has_largest else _largest_bits(bits[row])
        if magnitude[0] >= _INFINITY or magnitude[0] < 0:
            scale[row] = np.nan
            codes[row] = 0
        elif magnitude[0] == 0:
            scale[row] = 1
            codes[row] = 0
        else:
            step = max(np.float32(value[0] / _INT8_MAX), _MIN_SCALE)
            scale[row] = step
            of_row, out = x[row], codes[row]
            for j in range(of_row.size):
                out[j] = np.int8(np.int32(np.rint(of_row[j] / step)))


def quantize_rows(x: Tensor, largest: Tensor | None, codes: Tensor, scale: Tensor) -> None:
    """Writes the codes of x [rows, columns] and the scale of each row."""
    if codes.dtype != torch.int8:
        reference.quantize_rows(x, largest, codes, scale)
        return
    tops = scale if largest is None else largest
    # `Tensor.numpy` would forbid FSDP to free the storage of a weight that it has gathered.
    values = np.from_dlpack(x)
    run = partial(
        _code_rows,
        values,
        values.view(np.int32),
        tops.view(torch.int32).numpy(),
        largest is not None,
        codes.numpy(),
        scale.numpy(),
    )
    over_rows(run, len(x), x.nbytes + codes.nbytes)


def scaled_matmul(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, bias: Tensor | None, out: Tensor
) -> None:
    """Writes a [rows, columns] times b [b_rows, columns] transposed, scaled, plus bias, to `out`."""
    if a.dtype == torch.int8 and _adds_exactly():
        sums = torch._int_mm(a, b.t()).to(torch.float32)
    elif a.dtype == torch.int8:
        sums = a.to(torch.float32) @ b.to(torch.float32).t()
    else:
        sums = (a.to(torch.bfloat16) @ b.to(torch.bfloat16).t()).to(torch.float32)
    sums.mul_(a_scale[:, None]).mul_(b_scale)
    out.copy_(sums if bias is None else sums.add_(bias))


@cache
def _adds_exactly() -> bool:
    """Whether oneDNN's int8 products are exact on this processor, as limited by its variables."""
    codes = torch.full((32, 64), int(reference.INT8_MAX), dtype=torch.int8)
    return bool((torch._int_mm(codes, codes.t()) == 64 * reference.INT8_MAX**2).all())
