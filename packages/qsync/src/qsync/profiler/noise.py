"""Closed forms of the variance that rounding adds to products, and the indicator by depth.

Linear y = v w^T with v [rows, inner] and w [columns, inner], rounded to nearest or stochastically with
one scale a tensor, so that each element has an independent error:

forward   sum_k (A_k B_k + C_k D_k + A_k D_k), with A_k and D_k the variances of column k of v and of w
          summed over rows, C_k and B_k their squared elements summed over rows;
backward  of the weight gradient g^T v: inner |g|^2 s_v^2 + columns |v|^2 s_g^2, likewise.

"paper" is the norm product |w|^2 V(v) + |v|^2 V(w) after QSync (arXiv 2407.02327), V the variance
summed over a tensor. It exceeds the exact variance by about the inner dimension.
"""

from __future__ import annotations

from typing import Literal

from jaxtyping import Float
from torch import Tensor

from qsync.precisions import check_precision
from qsync.runtime.quantizers import check_rounding, find_step
from shared.errors import ConfigError, DataError

__all__ = ["Mode", "backward_noise", "forward_noise", "rounding_variance", "weigh_by_depth"]

Mode = Literal["exact", "paper"]

# Weight of the forward variance against the backward one in the published indicator's code.
_FORWARD_WEIGHT = 4.0


def rounding_variance(
    x: Float[Tensor, "*shape"], precision: str, *, rounding: str = "stochastic"
) -> Tensor:
    """Computes the variance of each element's rounding error: step^2 / 6, or / 12 to nearest.

    Returns:
        A tensor of x's shape.
    """
    check_rounding(rounding)
    step = find_step(x, precision)
    return step.square().div(6.0 if rounding == "stochastic" else 12.0).expand(x.shape)


def forward_noise(
    v: Float[Tensor, "rows inner"],
    w: Float[Tensor, "columns inner"],
    precision: str,
    *,
    rounding: str = "stochastic",
    mode: Mode = "exact",
) -> float:
    """Computes the variance of v w^T, summed over its elements, when both factors are rounded.

    Args:
        v: left factor.
        w: right factor; the product is with its transpose.
        precision: of both factors, each with one scale.
        rounding: "stochastic" or "nearest".
        mode: "exact", or "paper" for the published bound.

    Raises:
        ConfigError: precision, rounding or mode is unknown.
        DataError: the inner dimensions differ.
    """
    return _product_noise(v, w, precision, precision, rounding, mode)


def backward_noise(
    v: Float[Tensor, "rows inner"],
    gradient: Float[Tensor, "rows columns"],
    precision: str,
    *,
    rounding: str = "stochastic",
    mode: Mode = "exact",
) -> float:
    """Computes the variance of the weight gradient g^T v, summed over its elements.

    The saved v is rounded to the precision, g to that of its backward products.

    Raises:
        ConfigError: precision, rounding or mode is unknown.
        DataError: the numbers of rows differ.
    """
    backward = check_precision(precision).backward
    return _product_noise(v.t(), gradient.t(), precision, backward, rounding, mode)


def weigh_by_depth(forward: float, backward: float, depth: int, num_depths: int) -> float:
    """Combines both variances of an operator after the published indicator.

    Forward noise passes the operators that follow, gradient noise those before.

    Args:
        forward: variance of the product.
        backward: variance of the weight gradient.
        depth: position of the operator on the longest path from the input, from 0.
        num_depths: length of that path through the model.
    """
    return _FORWARD_WEIGHT * (num_depths - depth) * forward + depth * backward


def _product_noise(
    v: Tensor, w: Tensor, precision: str, w_precision: str, rounding: str, mode: Mode
) -> float:
    if mode not in ("exact", "paper"):
        raise ConfigError(f"mode: expected 'exact' or 'paper', got {mode!r}")
    if v.ndim != 2 or w.ndim != 2 or v.shape[1] != w.shape[1]:
        raise DataError(
            f"expected matrices that share their inner dimension, got {list(v.shape)} and "
            f"{list(w.shape)}"
        )
    v, w = v.detach().double(), w.detach().double()
    of_v = rounding_variance(v, precision, rounding=rounding).sum(0)
    of_w = rounding_variance(w, w_precision, rounding=rounding).sum(0)
    squares_v, squares_w = v.square().sum(0), w.square().sum(0)
    if mode == "paper":
        return float(squares_w.sum() * of_v.sum() + squares_v.sum() * of_w.sum())
    return float((of_v * squares_w + squares_v * of_w + of_v * of_w).sum())
