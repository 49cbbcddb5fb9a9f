"""Sparse times dense over compressed rows: sum, mean and maximum over in-edges, weighted.

The aggregation step of a graph network: `aggregate` with autograd; `spmm` and `segment_max` without,
in both directions and into given memory, for callers who own the backward pass.
"""

from typing import Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from shared.errors import ConfigError, DataError
from shared.kernels.registry import select
from shared.kernels.segment.autograd import Aggregate
from shared.kernels.segment.csr import CSR

__all__ = ["CSR", "SegmentMax", "aggregate", "segment_max", "spmm"]


class SegmentMax(NamedTuple):
    """The maximum over the entries of each row, and where it stands.

    Attributes:
        out: The maximum [rows, dim].
        argmax: int64 [rows, dim], positions in `csr.indices`; -1 in rows without entries.
    """

    out: Tensor
    argmax: Tensor


def spmm(
    csr: CSR,
    x: Float[Tensor, "cols dim"],
    *,
    reduce: Literal["sum", "mean", "max"] = "sum",
    transpose: bool = False,
    out: Float[Tensor, "rows dim"] | None = None,
    accumulate: bool = False,
) -> Float[Tensor, "rows dim"]:
    """out[r] = sum (mean, max) over the entries e of row r of weight[e] * x[indices[e]].

    Sums in float32 (float64 for float64 input); half types are widened first. The order of
    summation is fixed on the CPU, so results repeat to the bit whatever the number of threads.

    Args:
        csr: The matrix [rows, cols].
        x: Rows [cols, dim], of any float type.
        reduce: "sum"; "mean": the sum divided by the number of entries; "max": of each column. A
            row without entries is 0.
        transpose: Use the transposed matrix [cols, rows]; "mean" then counts its rows.
        out: Where the result goes; made in the type of `x` when None.
        accumulate: Add to `out` instead of overwriting it; not with "max".

    Returns:
        The product; `out` where it was given.

    Raises:
        ConfigError: `reduce` is none of the three, or `accumulate` comes without `out` or with "max".
        DataError: Shapes or devices do not fit.
    """
    _check_reduce(reduce)
    if accumulate and out is None:
        raise ConfigError("expected `out`, to which accumulate=True adds, got None; pass it")
    if accumulate and reduce == "max":
        raise ConfigError("expected reduce 'sum' or 'mean' with accumulate=True, got 'max'")
    if transpose:
        csr = csr.t()
    _check_x(csr, x)
    shape = (csr.num_rows, x.shape[1])
    if out is None:
        out = torch.empty(shape, dtype=x.dtype, device=x.device)
    if tuple(out.shape) != shape or out.device != x.device:
        raise DataError(
            f"expected out {list(shape)} on {x.device}, got {list(out.shape)} on {out.device}"
        )
    if reduce == "max":
        out.detach().copy_(segment_max(csr, x).out)
        return out
    if out.numel():
        with torch.no_grad():
            form = select("segment", x.device)
            form.spmm(csr.indptr, csr.indices, csr.weight, x, reduce == "mean", out, accumulate)
    return out


def segment_max(csr: CSR, x: Float[Tensor, "cols dim"], *, empty: float = 0.0) -> SegmentMax:
    """Computes the maximum over the entries e of each row of weight[e] * x[indices[e]].

    Of equal values the first entry's is taken; a NaN is larger than any number.

    Args:
        csr: The matrix [rows, cols].
        x: Rows [cols, dim], of any float type.
        empty: Value of rows without entries; -inf changes nothing in a maximum with other parts.

    Returns:
        Maxima in the type of `x`, and the entries that have them; not differentiable.

    Raises:
        DataError: Shapes or devices do not fit.
    """
    _check_x(csr, x)
    with torch.no_grad():
        form = select("segment", x.device)
        found = form.segment_max(csr.indptr, csr.indices, csr.weight, x.detach(), empty)
    return SegmentMax(*found)


def aggregate(
    csr: CSR, x: Float[Tensor, "cols dim"], reduce: Literal["sum", "mean", "max"] = "sum"
) -> Float[Tensor, "rows dim"]:
    """Computes `spmm(csr, x, reduce=reduce)`, once differentiable in `x`; weights are constants.

    The gradient of a maximum goes to the entry that `segment_max` names.

    Args:
        csr: The matrix [rows, cols].
        x: Rows [cols, dim], of any float type.
        reduce: As of `spmm`.

    Raises:
        ConfigError: `reduce` is none of the three.
        DataError: Shapes or devices do not fit.
    """
    _check_reduce(reduce)
    _check_x(csr, x)
    return Aggregate.apply(csr, x, reduce)


def _check_reduce(reduce: str) -> None:
    if reduce not in ("sum", "mean", "max"):
        raise ConfigError(f"expected reduce 'sum', 'mean' or 'max', got {reduce!r}")


def _check_x(csr: CSR, x: Tensor) -> None:
    if x.ndim != 2 or len(x) != csr.num_cols or x.device != csr.indptr.device:
        raise DataError(
            f"expected x [{csr.num_cols}, dim] on {csr.indptr.device}, got {list(x.shape)} "
            f"on {x.device}"
        )
