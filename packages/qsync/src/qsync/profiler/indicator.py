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
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from qsync.precisions import HIGHEST, sort_precisions
from qsync.profiler.gradients import (
    LossFunction,
    check_norm,
    find_gradient,
    measure_noise,
    measure_noises,
)
from qsync.profiler.state import in_float32, preserve_state
from qsync.profiler.taps import install_taps
from qsync.runtime.modules import list_operators
from shared.errors import ConfigError, DataError

__all__ = ["NUM_BATCHES", "OperatorNoise", "sensitivity"]

log = logging.getLogger(__name__)

NUM_BATCHES = 2
"""Batches that are read, at most."""
_NUM_PROBES = 4
# Noise up to which errors of many operators add up.
_ADDITIVE_NOISE = 0.1
# The probe is dismissed if it differs from a measurement by more.
_MAX_RATIO = 2.0


@dataclass(frozen=True, slots=True)
class OperatorNoise:
    """The noise of each operator in each precision.

    Attributes:
        noise: squared relative error of the whole gradient, by operator and precision.
        method: "probe", or "one operator at a time" if that does not hold for this model.
        reason: why the probe was dismissed; empty if it was not.
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
    Attention runs in its plain form, which has a double backward. The probe is compared with a
    measurement; where it fails, each operator is lowered by itself, which takes a step for each noise.

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
    noise: dict[str, dict[str, float]] = {}
    squared_norm = 0.0
    try:
        with in_float32(model):
            for batch in samples:
                squared_norm += _probe(model, batch, loss_fn, names, num_probes, generator, errors)
        noise = {
            name: {each: error / squared_norm for each, error in of_operator.items()}
            for name, of_operator in errors.items()
        }
        reason = _find_contradiction(model, samples[0], loss_fn, noise, names)
    except RuntimeError as error:
        reason = f"{type(error).__name__}: {str(error).splitlines()[0]}"
    if not reason:
        return OperatorNoise(noise, "probe")
    log.warning("lowering operators one by one, since the probe failed: %s", reason)
    # Lowering takes a step for each noise, so that one batch has to do.
    pairs = [(name, each) for name in operators for each in names if each != HIGHEST]
    measured = measure_noises(model, samples[:1], loss_fn, [{name: each} for name, each in pairs])
    noise = {name: dict.fromkeys(names, 0.0) for name in operators}
    for (name, each), one in zip(pairs, measured, strict=True):
        noise[name][each] = one
    return OperatorNoise(noise, "one operator at a time", reason)


def _find_contradiction(
    model: nn.Module,
    batch: Any,
    loss_fn: LossFunction,
    noise: dict[str, dict[str, float]],
    precisions: Sequence[str],
) -> str:
    """Compares the probe with the error of lowering many operators at once; says how they differ.

    They do where a derivative jumps, as ReLU's and max-pooling's, which no derivative predicts, and where
    an autograd function hides its second derivative.
    """
    for precision in precisions:
        chosen: dict[str, str] = {}
        predicted = 0.0
        for name, row in noise.items():
            if predicted + row[precision] <= _ADDITIVE_NOISE:
                chosen[name] = precision
                predicted += row[precision]
        if precision != HIGHEST and predicted > 0:
            measured = measure_noise(model, [batch], loss_fn, chosen)
            if not 1 / _MAX_RATIO < measured / predicted < _MAX_RATIO:
                return (
                    f"{len(chosen)} operators in {precision} have noise {measured:.3g}, not "
                    f"{predicted:.3g}: derivatives jump, as ReLU's, or have none themselves"
                )
    return ""


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
        squared_norm = check_norm(
            gradient, ((f"{tap.role} of {tap.operator!r}", tap.value) for tap in taps)
        )
        _check_double_backward(gradient)
        added: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        # Gradients of parameters that the loss does not depend on have no graph.
        depends = [each for each in gradient if each.requires_grad]
        inner = [tap for tap in taps if tap.variable is not None]
        variables = [tap.variable for tap in inner if tap.variable is not None]
        effects = [torch.zeros_like(tap.value) for tap in inner]
        for _ in range(num_probes):
            signs = [_draw_signs(each, generator) for each in depends]
            derivatives = torch.autograd.grad(
                depends,
                variables,
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


def _check_double_backward(gradient: Sequence[Tensor]) -> None:
    """Refuses functions that hide their second derivative, which would count as zero."""
    pending = [each.grad_fn for each in gradient]
    seen = set()
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.name() == "torch::autograd::Error":
            raise RuntimeError("an autograd function is once_differentiable")
        pending += [following for following, _ in node.next_functions]


def _draw_signs(like: Tensor, generator: torch.Generator) -> Tensor:
    bits = torch.randint(0, 2, like.shape, generator=generator, dtype=torch.int8)
    return (bits.to(like.device, like.dtype)).mul_(2).sub_(1)
