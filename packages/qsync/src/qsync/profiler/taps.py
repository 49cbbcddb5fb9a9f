"""Points of a model where a lowered operator rounds, as variables of its gradient.

While taps are installed, each operator of a model computes in float32 through aliases of its
factors and of its result. An alias belongs to one operator, so the derivative by it is the effect of a
rounding in that operator alone, in forward and where backward reads the tensor again. Roundings of
gradients are added as zeros by hooks, which the double backward differentiates by.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from qsync.precisions import HIGHEST, PRECISIONS
from qsync.runtime.modules import MatMul, list_inputs, list_operators
from qsync.runtime.quantizers import FLOAT_DTYPES, round_rows

__all__ = ["Tap", "install_taps"]

# Largest magnitude of a gradient while it is rounded to fp16: loss scaling keeps it in range.
_SCALED_EXPONENT = 8


@dataclass(slots=True)
class Tap:
    """A tensor that an operator rounds when it is lowered.

    Attributes:
        operator: name of the operator.
        role: a factor of the product, its result, the gradient of its result or of its input
            ("gradient"), or the gradient of its weight ("weight_gradient").
        value: the tensor.
        variable: what to differentiate by; None for a weight's gradient, which is part of the
            result.
        rows: views a factor as the matrix of which each row has a scale.
    """

    operator: str
    role: Literal["factor", "output", "gradient", "weight_gradient"]
    value: Tensor
    variable: Tensor | None
    rows: Callable[[Tensor], Tensor] | None = None

    def squared_error(self, precision: str) -> Tensor | None:
        """Returns the squared error of rounding each element; None where nothing is rounded."""
        if precision == HIGHEST:
            return None
        if self.role == "factor":
            assert self.rows is not None
            matrix = self.rows(self.value)
            error = (round_rows(matrix, precision) - matrix).square()
            return _unview(error, self.value, self.rows)
        if self.role == "output":
            # Products of codes are exact, and leave in float32.
            if PRECISIONS[precision].bits < 16:
                return None
            return (self.value.to(FLOAT_DTYPES[precision]) - self.value).square()
        backward = PRECISIONS[precision].backward
        value = self.value
        if backward == "fp16" and value.numel():
            exponent = torch.frexp(value.abs().amax()).exponent
            value = torch.ldexp(value, _SCALED_EXPONENT - exponent)
            error = value.to(FLOAT_DTYPES[backward]) - value
            return torch.ldexp(error, exponent - _SCALED_EXPONENT).square()
        return (value.to(FLOAT_DTYPES[backward]) - value).square()


def _unview(matrix: Tensor, like: Tensor, rows: Callable[[Tensor], Tensor]) -> Tensor:
    """Undoes `rows`, which keeps the order of elements but for a transposition."""
    if rows is _columns:
        return matrix.view(*like.shape[:-2], like.shape[-1], like.shape[-2]).transpose(-1, -2)
    return matrix.view(like.shape)


def _last_dim_rows(value: Tensor) -> Tensor:
    return value.reshape(-1, value.shape[-1])


def _first_dim_rows(value: Tensor) -> Tensor:
    return value.reshape(value.shape[0], -1)


def _columns(value: Tensor) -> Tensor:
    return value.transpose(-1, -2).reshape(-1, value.shape[-2])


@contextmanager
def install_taps(model: nn.Module, names: list[str]) -> Iterator[list[Tap]]:
    """Taps operators while the block runs; each forward and backward appends to the list."""
    operators = list_operators(model)
    taps: list[Tap] = []
    try:
        for name in names:
            module = operators[name]
            module.forward = partial(_run_tapped, name, module, taps)
        yield taps
    finally:
        for name in names:
            vars(operators[name]).pop("forward", None)


def _run_tapped(name: str, module: Any, taps: list[Tap], *args: Tensor, **words: Tensor) -> Tensor:
    inputs = list_inputs(args, words)
    if not torch.is_grad_enabled():
        raise RuntimeError(f"{name!r} runs under torch.no_grad, where nothing has a derivative")
    if isinstance(module, MatMul):
        a = _tap_factor(taps, name, inputs[0], _last_dim_rows)
        b = _tap_factor(taps, name, inputs[1], _columns)
        return _tap_output(taps, name, a @ b)
    weight = _tap_weight(taps, name, module)
    if isinstance(module, nn.Embedding):
        # Its result has the factor's rounding, and its gradient is summed in float32.
        return functional.embedding(
            inputs[0], weight, module.padding_idx, scale_grad_by_freq=module.scale_grad_by_freq
        )
    is_linear = isinstance(module, nn.Linear)
    x = inputs[0]
    if not is_linear and x.ndim == len(module.stride) + 1:
        return _run_tapped(name, module, taps, x[None])[0]
    x = _tap_factor(taps, name, x, _last_dim_rows if is_linear else _first_dim_rows)
    if is_linear:
        return _tap_output(taps, name, functional.linear(x, weight, module.bias))
    return _tap_output(taps, name, module._conv_forward(x, weight, module.bias))


def _tap_factor(taps: list[Tap], name: str, x: Tensor, rows: Callable[[Tensor], Tensor]) -> Tensor:
    needs_grad = x.requires_grad
    alias = x.view_as(x) if needs_grad else x.detach().requires_grad_()
    taps.append(Tap(name, "factor", alias.detach(), alias, rows))
    if needs_grad:
        alias.register_hook(partial(_tap_gradient, taps, name))
    return alias


def _tap_weight(taps: list[Tap], name: str, module: Any) -> Tensor:
    # Several calls round the weight to the same numbers: one alias adds up their effects.
    for tap in taps:
        is_weight = tap.role == "factor" and tap.value.data_ptr() == module.weight.data_ptr()
        if tap.operator == name and is_weight:
            return cast("Tensor", tap.variable)
    weight = module.weight
    trains = weight.requires_grad
    alias = weight.view_as(weight) if trains else weight.detach().requires_grad_()
    taps.append(Tap(name, "factor", alias.detach(), alias, _first_dim_rows))
    # A GPU sums a weight's gradient in float32; a CPU rounds the sum to 16 bits. Embeddings add up
    # in float32 anywhere.
    if trains and alias.device.type == "cpu" and not isinstance(module, nn.Embedding):
        alias.register_hook(partial(_record_weight_gradient, taps, name))
    return alias


def _tap_output(taps: list[Tap], name: str, y: Tensor) -> Tensor:
    alias = y.view_as(y)
    taps.append(Tap(name, "output", alias.detach(), alias))
    if alias.requires_grad:
        alias.register_hook(partial(_tap_gradient, taps, name))
    return alias


def _tap_gradient(taps: list[Tap], name: str, gradient: Tensor) -> Tensor | None:
    if not torch.is_grad_enabled():
        return None
    zero = torch.zeros_like(gradient, requires_grad=True)
    taps.append(Tap(name, "gradient", gradient.detach(), zero))
    return gradient + zero


def _record_weight_gradient(taps: list[Tap], name: str, gradient: Tensor) -> None:
    # Probes run this hook again, on derivatives of the gradient.
    if torch.is_grad_enabled():
        taps.append(Tap(name, "weight_gradient", gradient.detach(), None))
