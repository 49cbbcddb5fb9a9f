"""One fused step of Adam or AdamW, the residual that makes it exactly invertible, and its inverse.

The step is torch's (`torch.optim.Adam`, `AdamW`, without amsgrad), every operation rounded by itself
in float32, and in bfloat16 what is stored rounded once more; torch's own forms differ from it, and
from each other, by a few roundings. The inverse is that of "SWIFT: Expedited Failure Recovery for
Large-scale DNN Training" (arXiv 2302.06173). Rounding loses what the inverse needs, so the step can
also store how many units in the last place the inverse will be off: one byte a value, and the value
itself where a byte is too narrow (an escape).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from shared.errors import DataError
from shared.kernels.adam.factors import Factors, factors
from shared.kernels.adam.hyper import Hyper
from shared.kernels.adam.layout import BLOCK, AdamTensors, Residual
from shared.kernels.adam.ulps import ESCAPE, add_ulps, ulps_between
from shared.kernels.registry import select

__all__ = [
    "BLOCK",
    "ESCAPE",
    "AdamTensors",
    "Hyper",
    "Residual",
    "add_ulps",
    "new_residual",
    "step",
    "ulps_between",
    "undo",
]

_DTYPES = (torch.float32, torch.bfloat16)


def new_residual(param: Tensor) -> Residual:
    """Room for the residual of a parameter [n]: 3 bytes a value, and what escapes later."""
    num_blocks = -(-len(param) // BLOCK)
    # Of zeros nothing escapes: an undo without its step is wrong, but reads no memory that is not its own.
    return Residual(
        codes=torch.zeros(3, len(param), dtype=torch.int8, device=param.device),
        bases=torch.zeros(num_blocks, dtype=torch.int64, device=param.device),
        escapes=torch.empty(0, dtype=param.dtype, device=param.device),
    )


def step(
    tensors: Sequence[AdamTensors],
    steps: Sequence[int],
    hyper: Hyper,
    residuals: Sequence[Residual] | None = None,
) -> None:
    """Step parameters in place.

    Args:
        tensors: Parameters with their gradients and averages, all on one device.
        steps: The number of this step, by parameter; the first is 1.
        hyper: Hyperparameters, rounded to float32 where they meet the tensors.
        residuals: Filled by parameter, so that `undo` is exact; None: nothing is kept. On a GPU the
            host then waits for the device once.

    Raises:
        DataError: Tensors of a parameter differ in shape, type or device, are not contiguous or of
            another type than float32 and bfloat16, or a residual has another size.
    """
    _run("step", tensors, steps, hyper, residuals)


def undo(
    tensors: Sequence[AdamTensors],
    steps: Sequence[int],
    hyper: Hyper,
    residuals: Sequence[Residual] | None = None,
) -> None:
    """Undo a step in place: with its residuals to the bit, without them up to rounding.

    Without residuals `exp_avg_sq` is held at 0 or above, which rounding alone would not do.

    Args:
        tensors: Parameters and averages after the step, with the gradients of the step.
        steps: As given to `step`.
        hyper: As given to `step`.
        residuals: As filled by `step`.

    Raises:
        DataError: As for `step`.
    """
    _run("undo", tensors, steps, hyper, residuals)


def _run(
    what: str,
    tensors: Sequence[AdamTensors],
    steps: Sequence[int],
    hyper: Hyper,
    residuals: Sequence[Residual] | None,
) -> None:
    if len(steps) != len(tensors) or (residuals is not None and len(residuals) != len(tensors)):
        raise DataError(
            f"expected a step number and a residual for each of {len(tensors)} parameters, got "
            f"{len(steps)} and {None if residuals is None else len(residuals)}"
        )
    for place, of in enumerate(tensors):
        _check(place, of, None if residuals is None else residuals[place])
    worked_out: dict[int, Factors] = {number: factors(hyper, number) for number in set(steps)}
    # Nothing to launch for empty tensors, whose residual is complete as it is.
    places = [place for place, of in enumerate(tensors) if len(of.param)]
    if places:
        form = select("adam", tensors[places[0]].param.device)
        with torch.no_grad():
            getattr(form, what)(
                [tensors[place] for place in places],
                [worked_out[steps[place]] for place in places],
                None if residuals is None else [residuals[place] for place in places],
            )


def _check(place: int, of: AdamTensors, residual: Residual | None) -> None:
    like = of.param
    for name, tensor in of._asdict().items():
        if (
            tensor.dim() != 1
            or len(tensor) != len(like)
            or tensor.dtype != like.dtype
            or tensor.dtype not in _DTYPES
            or tensor.device != like.device
            or not tensor.is_contiguous()
        ):
            raise DataError(
                f"expected {name} of parameter {place} to be contiguous [{like.numel()}], float32 or "
                f"bfloat16 like its parameter ({like.dtype}, {like.device}), got {tensor.dtype} "
                f"{list(tensor.shape)} on {tensor.device}, strides {tensor.stride()}: flatten it"
            )
    if residual is not None and not residual.fits(like):
        raise DataError(
            f"expected a residual of {len(like)} values, {like.dtype} on {like.device}, for parameter "
            f"{place}, got {residual.codes.shape[1]}, {residual.escapes.dtype} on "
            f"{residual.codes.device}: make it with new_residual"
        )
