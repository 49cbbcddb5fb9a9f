"""Sparse times dense over compressed rows: sum and mean over in-edges, weighted, both directions.

The aggregation step of a graph network, without autograd: its backward is the same product with the
transposed matrix, and callers who need it own it.
"""

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from shared.errors import ConfigError, DataError
from shared.kernels.registry import select
from shared.kernels.segment.csr import CSR

__all__ = ["CSR", "spmm"]


def spmm(
    csr: CSR,
    x: Float[Tensor, "cols dim"],
    *,
    reduce: Literal["sum", "mean"] = "sum",
    transpose: bool = False,
    out: Float[Tensor, "rows dim"] | None = None,
    accumulate: bool = False,
) -> Float[Tensor, "rows dim"]:
    """out[r] = sum (or mean) over the entries e of row r of weight[e] * x[indices[e]].

    Sums in float32 (float64 for float64 input); half types are widened first. The order of
    summation is fixed on the CPU, so results repeat to the bit whatever the number of threads.

    Args:
        csr: The matrix [rows, cols].
        x: Rows [cols, dim], of any float type.
        reduce: "sum", or "mean": the sum divided by the number of entries, 0 for an empty row.
        transpose: Use the transposed matrix [cols, rows]; "mean" then counts its rows.
        out: Where the result goes; made in the type of `x` when None.
        accumulate: Add to `out` instead of overwriting it.

    Returns:
        The product; `out` where it was given.

    Raises:
        ConfigError: `reduce` is neither of the two, or `accumulate` comes without `out`.
        DataError: Shapes or devices do not fit.
    """
    if reduce not in ("sum", "mean"):
        raise ConfigError(f"expected reduce 'sum' or 'mean', got {reduce!r}")
    if accumulate and out is None:
        raise ConfigError("expected `out`, to which accumulate=True adds, got None; pass it")
    if transpose:
        csr = csr.t()
    if x.ndim != 2 or len(x) != csr.num_cols or x.device != csr.indptr.device:
        raise DataError(
            f"expected x [{csr.num_cols}, dim] on {csr.indptr.device}, got {list(x.shape)} "
            f"on {x.device}"
        )
    shape = (csr.num_rows, x.shape[1])
    if out is None:
        out = torch.empty(shape, dtype=x.dtype, device=x.device)
    if tuple(out.shape) != shape or out.device != x.device:
        raise DataError(
            f"expected out {list(shape)} on {x.device}, got {list(out.shape)} on {out.device}"
        )
    if out.numel():
        with torch.no_grad():
            form = select("segment", x.device)
            form.spmm(csr.indptr, csr.indices, csr.weight, x, reduce == "mean", out, accumulate)
    return out
