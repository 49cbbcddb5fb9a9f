"""The gradient of a step, and the error that lowered operators cause in it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from qsync.profiler.state import in_float32, preserve_state
from qsync.runtime.modules import list_operators, set_precision
from shared.errors import ConfigError, DataError

__all__ = [
    "LossFunction",
    "check_loss",
    "check_norm",
    "find_gradient",
    "measure_noise",
    "measure_noises",
    "sum_squares",
]

LossFunction = Callable[[nn.Module, Any], Tensor]


def measure_noise(
    model: nn.Module, batches: Iterable[Any], loss_fn: LossFunction, precisions: dict[str, str]
) -> float:
    """Measures the squared relative error of the gradient when operators are lowered.

    Args:
        model: float32 model; it is left as it was.
        batches: training batches; all are read.
        loss_fn: returns the loss of (model, batch).
        precisions: precision by operator; others compute in float32.

    Raises:
        ConfigError: the loss is no scalar with a gradient, or the model trains nothing.
        DataError: a gradient is zero or not finite.
    """
    return measure_noises(model, batches, loss_fn, [precisions])[0]


def measure_noises(
    model: nn.Module,
    batches: Iterable[Any],
    loss_fn: LossFunction,
    choices: Sequence[dict[str, str]],
) -> list[float]:
    """Measures several choices of precisions against one float32 gradient; see `measure_noise`."""
    operators = list_operators(model)
    errors, squared_norm = [0.0] * len(choices), 0.0
    with in_float32(model), sdpa_kernel(SDPBackend.MATH):
        for batch in batches:
            with preserve_state(model):
                exact = find_gradient(model, batch, loss_fn)
            squared_norm += check_norm(exact)
            for i, precisions in enumerate(choices):
                with preserve_state(model), in_float32(model):
                    for name, precision in precisions.items():
                        set_precision(operators[name], precision)
                    lowered = find_gradient(model, batch, loss_fn)
                errors[i] += sum_squares(a - b for a, b in zip(exact, lowered, strict=True))
    return [error / squared_norm for error in errors]


def find_gradient(
    model: nn.Module, batch: Any, loss_fn: LossFunction, *, create_graph: bool = False
) -> list[Tensor]:
    """Computes the gradient of all trained parameters, zero where the loss does not depend on one.

    Raises:
        ConfigError: the loss is no scalar with a gradient, or the model trains nothing.
    """
    parameters = [each for each in model.parameters() if each.requires_grad]
    if not parameters:
        raise ConfigError("model: expected a parameter that requires a gradient, got none")
    with torch.enable_grad():
        return list(
            torch.autograd.grad(
                check_loss(loss_fn(model, batch)).sum(),
                parameters,
                create_graph=create_graph,
                allow_unused=True,
                materialize_grads=True,
            )
        )


def check_loss(loss: Any) -> Tensor:
    """Returns the loss of a step.

    Raises:
        ConfigError: it is no scalar tensor, or has no gradient.
    """
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
        got = type(loss).__name__
        if isinstance(loss, Tensor):
            got = f"{list(loss.shape)}{'' if loss.requires_grad else ' without a gradient'}"
        raise ConfigError(
            f"loss_fn: expected a scalar tensor with a gradient, got {got}; return the loss of "
            "loss_fn(model, batch), and leave a parameter to train"
        )
    return loss


def sum_squares(tensors: Iterable[Tensor]) -> float:
    """Adds up all squared elements, in float64."""
    return sum(float(each.detach().square().sum(dtype=torch.float64)) for each in tensors)


def check_norm(gradient: Sequence[Tensor], factors: Iterable[tuple[str, Tensor]] = ()) -> float:
    """Returns the squared norm of a gradient that can serve as a reference.

    Args:
        gradient: of all trained parameters.
        factors: what was computed with, by name, to be named if it is not finite.

    Raises:
        DataError: the norm is zero or not finite.
    """
    squared_norm = sum_squares(gradient)
    if 0 < squared_norm < float("inf"):
        return squared_norm
    for name, factor in factors:
        if not bool(factor.isfinite().all()):
            raise DataError(
                f"expected finite tensors, got NaN or infinity as {name}; check the batch, the weights "
                "and the loss"
            )
    raise DataError(
        f"expected a gradient that is finite and not zero, got a squared norm of {squared_norm}; check "
        "the loss"
    )
