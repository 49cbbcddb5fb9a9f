"""Adam and row-wise AdaGrad on some rows in Triton: a program a row of the table."""

import triton
import triton.language as tl
from torch import Tensor

from shared.kernels.row_adam.reference import count_steps

__all__ = ["adagrad_step", "count_steps", "step"]

_MAX_COLS = 1024


@triton.jit
def _step(  # noqa: ANN202
    weight,  # noqa: ANN001
    first,  # noqa: ANN001
    second,  # noqa: ANN001
    rows,  # noqa: ANN001
    grads,  # noqa: ANN001
    rates,  # noqa: ANN001
    dim,  # noqa: ANN001
    fresh1,  # noqa: ANN001
    fresh2,  # noqa: ANN001
    eps,  # noqa: ANN001
    weight_decay,  # noqa: ANN001
    COLS: tl.constexpr,
):
    nth = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * COLS + tl.arange(0, COLS)
    inside = cols < dim
    place = tl.load(rows + nth) * dim + cols
    before = tl.load(weight + place, mask=inside, other=0.0)
    m = tl.load(first + place, mask=inside, other=0.0)
    v = tl.load(second + place, mask=inside, other=0.0)
    slope = tl.load(grads + nth * dim + cols, mask=inside, other=0.0) + weight_decay * before
    m += (slope - m) * fresh1
    v += (slope * slope - v) * fresh2
    tl.store(first + place, m, mask=inside)
    tl.store(second + place, v, mask=inside)
    after = before - tl.load(rates + nth) * (m / (tl.sqrt(v) + eps))
    tl.store(weight + place, after, mask=inside)


@triton.jit
def _adagrad_step(  # noqa: ANN202
    weight,  # noqa: ANN001
    totals,  # noqa: ANN001
    rows,  # noqa: ANN001
    grads,  # noqa: ANN001
    dim,  # noqa: ANN001
    lr,  # noqa: ANN001
    eps,  # noqa: ANN001
    COLS: tl.constexpr,
):
    nth = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, COLS)
    inside = cols < dim
    row = tl.load(rows + nth)
    grad = tl.load(grads + nth * dim + cols, mask=inside, other=0.0)
    total = tl.load(totals + row) + tl.sum(grad * grad, 0) / dim
    tl.store(totals + row, total)
    place = weight + row * dim + cols
    before = tl.load(place, mask=inside, other=0.0)
    tl.store(place, before - grad * (lr / (tl.sqrt(total) + eps)), mask=inside)


def step(
    weight: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    rows: Tensor,
    grads: Tensor,
    rates: Tensor,
    hyper: tuple[float, float, float, float],
) -> None:
    """Update rows by Adam: rates are lr sqrt(1 - beta2^t) / (1 - beta1^t) of each row."""
    dim = weight.shape[1]
    cols = min(_MAX_COLS, triton.next_power_of_2(dim))
    fresh1, fresh2, eps, weight_decay = hyper
    grid = (len(rows), triton.cdiv(dim, cols))
    _step[grid](
        weight.detach(),
        exp_avg.detach(),
        exp_avg_sq.detach(),
        rows,
        grads,
        rates,
        dim,
        fresh1,
        fresh2,
        eps,
        weight_decay,
        COLS=cols,
        num_warps=max(1, min(4, cols // 64)),
    )


def adagrad_step(
    weight: Tensor, totals: Tensor, rows: Tensor, grads: Tensor, lr: float, eps: float
) -> None:
    """Update rows by AdaGrad with one total a row."""
    dim = weight.shape[1]
    _adagrad_step[(len(rows),)](
        weight.detach(),
        totals.detach(),
        rows,
        grads,
        dim,
        lr,
        eps,
        COLS=triton.next_power_of_2(dim),
    )
