"""How much lowering an operator disturbs the gradient of a training step.

The noise of an operator in a precision is the squared relative error of the whole gradient when
that operator alone is lowered. Errors of different operators add up.

The probe finds all of them at once. For random signs u let s = <grad L, u>, and r the derivative of s
by a tensor that the operator rounds, by double backward. An error e of that tensor changes s by
<r, e>, and the mean of this squared over u is the squared error of the gradient. Rounding errors of
different elements are taken as uncorrelated, so the noise is the mean over u of
sum(r^2 e^2) / |grad L|^2. The tensors are both factors, forward and where backward reads them again, a
16-bit result, and the gradients that backward rounds.

Departs from the variance indicator of QSync (arXiv 2407.02327), which weighs an operator's own variance
by its depth; see `qsync.profiler.noise` for that one.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from qsync.precisions import HIGHEST, sort_precisions
from qsync.profiler.state import preserve_state
from qsync.profiler.taps import Tap, install_taps
from qsync.runtime.modules import get_precision, list_operators, set_precision
from shared.errors import ConfigError, DataError

__all__ = ["LossFunction", "OperatorNoise", "find_gradient", "measure_noise", "sensitivity"]

log = logging.getLogger(__name__)

LossFunction = Callable[[nn.Module, Any], Tensor]
NUM_BATCHES = 2
"""Batches that are read, at most."""
_NUM_PROBES = 4


@dataclass(frozen=True, slots=True)
class OperatorNoise:
    """The noise of each operator in each precision.

    Attributes:
        noise: squared relative error of the whole gradient, by operator and precision.
        method: "probe", or "one operator at a time" if the model has no double backward.
        reason: why the probe failed; empty if it did not.
    """

    noise: dict[str, dict[str, float]]
    method: str
    reason: str = ""


def sensitivity(
    model: nn.Module,
    batches: Iterable[Any],
    loss_fn: LossFunction,
    *,
    precisions: Sequence[str] = ("fp32", "bf16", "int8"),
    num_probes: int = _NUM_PROBES,
    seed: int = 0,
) -> OperatorNoise:
    """Estimates the noise of lowering each operator, at the cost of a few training steps.

    The model is left as it was: weights, gradients, buffers, training modes and random generators.
    Attention runs in its plain form, which has a double backward.

    Args:
        model: float32 model, in the training mode to be judged. Operators that are lowered already
            count as float32.
        batches: training batches; the first two are read.
        loss_fn: returns the loss of (model, batch), a scalar.
        precisions: names to judge.
        num_probes: random sign vectors a batch; the relative spread of a noise falls with the root
            of it.
        seed: seed of the signs.

    Returns:
        The noise by operator, with 0 for "fp32".

    Raises:
        ConfigError: a precision is unknown, the model has no operators or trains nothing, or the loss
            is no scalar with a gradient.
        DataError: there is no batch, or a gradient is zero or not finite.
    """
    names = sort_precisions(precisions)
    if num_probes < 1:
        raise ConfigError(f"num_probes: expected at least 1, got {num_probes}")
    operators = list_operators(model)
    if not operators:
        raise ConfigError(
            f"model: expected linear layers, convolutions or embeddings, got a "
            f"{type(model).__name__} without any; there is nothing to lower"
        )
    samples = list(islice(batches, NUM_BATCHES))
    if not samples:
        raise DataError("batches: expected at least one, got none")
    generator = torch.Generator().manual_seed(seed)
    errors: dict[str, dict[str, float]] = {name: dict.fromkeys(names, 0.0) for name in operators}
    squared_norm, reason = 0.0, ""
    with _in_float32(operators):
        for batch in samples:
            if not reason:
                try:
                    squared_norm += _probe(
                        model, batch, loss_fn, names, num_probes, generator, errors
                    )
                    continue
                except RuntimeError as error:
                    reason = f"{type(error).__name__}: {str(error).splitlines()[0]}"
                    log.warning("no double backward (%s): lowering operators one by one", reason)
                    break
    if reason:
        noise = {
            name: {each: measure_noise(model, samples, loss_fn, {name: each}) for each in names}
            for name in operators
        }
        return OperatorNoise(noise, "one operator at a time", reason)
    noise = {
        name: {each: error / squared_norm for each, error in of_operator.items()}
        for name, of_operator in errors.items()
    }
    return OperatorNoise(noise, "probe")


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
    operators = list_operators(model)
    error, squared_norm = 0.0, 0.0
    with _in_float32(operators), sdpa_kernel(SDPBackend.MATH):
        for batch in batches:
            with preserve_state(model):
                exact = find_gradient(model, batch, loss_fn)
            for name, precision in precisions.items():
                set_precision(operators[name], precision)
            try:
                with preserve_state(model):
                    lowered = find_gradient(model, batch, loss_fn)
            finally:
                for name in precisions:
                    set_precision(operators[name], HIGHEST)
            error += _sum_squares(a - b for a, b in zip(exact, lowered, strict=True))
            squared_norm += _check_norm(exact, [])
    return error / squared_norm


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
        loss = loss_fn(model, batch)
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
            shape = list(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise ConfigError(
                f"loss_fn: expected a scalar tensor with a gradient, got {shape}; return the loss of "
                "loss_fn(model, batch)"
            )
        return list(
            torch.autograd.grad(
                loss.sum(),
                parameters,
                create_graph=create_graph,
                allow_unused=True,
                materialize_grads=True,
            )
        )


def _probe(
    model: nn.Module,
    batch: Any,
    loss_fn: LossFunction,
    precisions: Sequence[str],
    num_probes: int,
    generator: torch.Generator,
    errors: dict[str, dict[str, float]],
) -> float:
    """Adds each operator's squared error of the gradient to `errors`; returns its squared norm."""
    with (
        preserve_state(model),
        sdpa_kernel(SDPBackend.MATH),
        install_taps(model, list(errors)) as taps,
    ):
        gradient = find_gradient(model, batch, loss_fn, create_graph=True)
        squared_norm = _check_norm(gradient, taps)
        added: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        # Gradients of parameters that the loss does not depend on have no graph.
        depends = [each for each in gradient if each.requires_grad]
        inner = [tap for tap in taps if tap.variable is not None]
        effects = [torch.zeros_like(tap.value) for tap in inner]
        for _ in range(num_probes):
            signs = [_draw_signs(each, generator) for each in depends]
            derivatives = torch.autograd.grad(
                depends,
                [tap.variable for tap in inner],  # type: ignore[misc]
                signs,
                retain_graph=True,
                allow_unused=True,
            )
            for effect, derivative in zip(effects, derivatives, strict=True):
                if derivative is not None:
                    effect.addcmul_(derivative, derivative, value=1 / num_probes)
        for precision in precisions:
            for tap, effect in zip(inner, effects, strict=True):
                error = tap.squared_error(precision)
                if error is not None:
                    added[tap.operator][precision] += float((error * effect).sum())
            for tap in taps:
                if tap.variable is None:
                    error = tap.squared_error(precision)
                    if error is not None:
                        added[tap.operator][precision] += float(error.sum())
    for name, of_operator in added.items():
        for precision, error in of_operator.items():
            errors[name][precision] += error
    return squared_norm


def _draw_signs(like: Tensor, generator: torch.Generator) -> Tensor:
    bits = torch.randint(0, 2, like.shape, generator=generator, dtype=torch.int8)
    return (bits.to(like.device, like.dtype)).mul_(2).sub_(1)


def _sum_squares(tensors: Iterable[Tensor]) -> float:
    return sum(float(each.detach().square().sum(dtype=torch.float64)) for each in tensors)


def _check_norm(gradient: Sequence[Tensor], taps: Sequence[Tap]) -> float:
    """Returns the squared norm of a gradient that can serve as a reference."""
    squared_norm = _sum_squares(gradient)
    if 0 < squared_norm < float("inf"):
        return squared_norm
    for tap in taps:
        if not bool(tap.value.isfinite().all()):
            raise DataError(
                f"expected finite tensors, got NaN or infinity as {tap.role} of {tap.operator!r}; "
                "check the batch, the weights and the loss"
            )
    raise DataError(
        f"expected a gradient that is finite and not zero, got a squared norm of {squared_norm}; check "
        "the loss"
    )


@contextmanager
def _in_float32(operators: dict[str, nn.Module]) -> Iterator[None]:
    """Raises operators that a plan has lowered while the block runs."""
    lowered = {name: get_precision(module) for name, module in operators.items()}
    for module in operators.values():
        set_precision(module, HIGHEST)
    try:
        yield
    finally:
        for name, precision in lowered.items():
            set_precision(operators[name], precision)
