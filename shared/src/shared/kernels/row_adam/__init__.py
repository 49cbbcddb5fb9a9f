"""Adam and row-wise AdaGrad on the rows of a table that a step has touched, in place.

Other rows and their moments stay as they are. Each row counts its own steps, so that a row that is
touched for the first time late in training has the bias correction of a first step. Arithmetic is
`torch.optim.SparseAdam`'s: m += (1 - beta1)(g - m); v += (1 - beta2)(g^2 - v);
w -= lr sqrt(1 - beta2^t) / (1 - beta1^t) * m / (sqrt(v) + eps). AdaGrad keeps one number a row, the
sum of its gradients' mean squares.
"""

import math

import torch
from jaxtyping import Float, Int32, Int64
from torch import Tensor

from shared.errors import ConfigError, DataError
from shared.kernels.registry import select

__all__ = ["adagrad_step", "step"]


def step(
    weight: Float[Tensor, "rows dim"],
    exp_avg: Float[Tensor, "rows dim"],
    exp_avg_sq: Float[Tensor, "rows dim"],
    steps: Int32[Tensor, " rows"],
    rows: Int64[Tensor, " n"],
    grads: Float[Tensor, "n dim"],
    *,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
) -> None:
    """Updates weight[rows], their moments and their counts of steps.

    Args:
        weight: The table, float32; contiguous, as the moments are.
        exp_avg: First moments; zeros before the first step.
        exp_avg_sq: Second moments; zeros before the first step.
        steps: Steps that each row has taken.
        rows: Rows to update, none twice. Checked on the CPU only.
        grads: Their gradients, of any float type.
        lr: Learning rate.
        betas: Decay of the moments, each in [0, 1).
        eps: Added to the root of the second moment.
        weight_decay: Factor of the weight that is added to the gradient of a touched row.

    Raises:
        ConfigError: A hyperparameter lies outside its range.
        DataError: A shape or type does not fit, a row lies outside the table or is named twice;
            nothing is updated.
    """
    if not (0 <= betas[0] < 1 and 0 <= betas[1] < 1) or min(lr, eps, weight_decay) < 0:
        raise ConfigError(
            f"expected betas in [0, 1) and lr, eps and weight_decay of 0 or more, got betas "
            f"{betas}, lr {lr}, eps {eps}, weight_decay {weight_decay}"
        )
    _check_table(weight, exp_avg=exp_avg, exp_avg_sq=exp_avg_sq)
    _check_column("steps", steps, torch.int32, len(weight))
    _check_rows(weight, rows, grads)
    if not grads.numel():
        return
    with torch.no_grad():
        form = select("row_adam", weight.device)
        rows = rows.contiguous()
        counts = form.count_steps(steps, rows)
        if rows.device.type == "cpu" and not torch.equal(steps[rows], counts):
            steps.index_add_(0, rows, torch.full_like(counts, -1))
            raise DataError(_twice(rows))
        fresh1, fresh2 = (_complement(beta, counts) for beta in betas)
        form.step(
            weight,
            exp_avg,
            exp_avg_sq,
            rows,
            grads.detach().to(weight.dtype).contiguous(),
            lr * fresh2.sqrt() / fresh1,
            (1 - betas[0], 1 - betas[1], eps, weight_decay),
        )


def adagrad_step(
    weight: Float[Tensor, "rows dim"],
    totals: Float[Tensor, " rows"],
    rows: Int64[Tensor, " n"],
    grads: Float[Tensor, "n dim"],
    *,
    lr: float,
    eps: float = 1e-10,
) -> None:
    """Updates weight[rows] by totals[rows] += mean of g^2; weight -= lr g / (sqrt(totals) + eps).

    Args:
        weight: The table, float32, contiguous.
        totals: One number a row, float32; zeros before the first step.
        rows: Rows to update, none twice. Checked on the CPU only.
        grads: Their gradients, of any float type.
        lr: Learning rate.
        eps: Added to the root of the total.

    Raises:
        ConfigError: A hyperparameter is negative.
        DataError: A shape or type does not fit, a row lies outside the table or is named twice;
            nothing is updated.
    """
    if min(lr, eps) < 0:
        raise ConfigError(f"expected lr and eps of 0 or more, got lr {lr}, eps {eps}")
    _check_table(weight)
    _check_column("totals", totals, torch.float32, len(weight))
    _check_rows(weight, rows, grads)
    if rows.device.type == "cpu" and len(rows.unique()) != len(rows):
        raise DataError(_twice(rows))
    if not grads.numel():
        return
    with torch.no_grad():
        form = select("row_adam", weight.device)
        form.adagrad_step(
            weight,
            totals,
            rows.contiguous(),
            grads.detach().to(weight.dtype).contiguous(),
            lr,
            eps,
        )


def _complement(beta: float, counts: Tensor) -> Tensor:
    """1 - beta^count, to float32's precision for small counts too."""
    return (
        -torch.expm1(counts.float() * math.log(beta)) if beta else torch.ones_like(counts.float())
    )


def _check_table(weight: Tensor, **moments: Tensor) -> None:
    for name, tensor in {"weight": weight, **moments}.items():
        is_float = tensor.dtype == torch.float32
        if not is_float or tensor.shape != weight.shape or not tensor.is_contiguous():
            raise DataError(
                f"expected {name} to be contiguous float32 {list(weight.shape)}, got "
                f"{tensor.dtype} {list(tensor.shape)} with strides {tensor.stride()}"
            )


def _check_column(name: str, tensor: Tensor, dtype: torch.dtype, num_rows: int) -> None:
    if tensor.dtype != dtype or tensor.shape != (num_rows,) or not tensor.is_contiguous():
        raise DataError(
            f"expected {name} to be contiguous {dtype} [{num_rows}], got {tensor.dtype} "
            f"{list(tensor.shape)} with strides {tensor.stride()}"
        )


def _check_rows(weight: Tensor, rows: Tensor, grads: Tensor) -> None:
    if tuple(grads.shape) != (len(rows), weight.shape[1]):
        raise DataError(f"expected grads {[len(rows), weight.shape[1]]}, got {list(grads.shape)}")
    # On a GPU the check would make the host wait for the device.
    if rows.device.type == "cpu" and len(rows):
        low, high = (int(bound) for bound in rows.aminmax())
        if low < 0 or high >= len(weight):
            raise DataError(f"expected rows in [0, {len(weight)}), got {low} to {high}")


def _twice(rows: Tensor) -> str:
    ids, counts = rows.unique(return_counts=True)
    row, count = int(ids[counts.argmax()]), int(counts.max())
    return f"expected each row once, got row {row} {count} times; sum the gradients of a row"
