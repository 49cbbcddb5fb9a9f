"""Modules whose product runs in a chosen precision.

Lowering replaces a module's class and nothing else: parameters, hooks, names, the order of
parameters and every reference to the module stay. Its state dict stays that of the float32 module.
Only exact types are lowered, since a subclass may compute something else.
"""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor, nn
from torch.nn import functional

from qsync.precisions import HIGHEST
from qsync.runtime.functions import ConvolutionGeometry
from qsync.runtime.products import convolve, embed, linear, matmul

__all__ = ["MatMul", "get_precision", "list_inputs", "list_operators", "set_precision"]


class LoweredLinear(nn.Linear):
    """A linear layer in the precision `precision`."""

    precision: str

    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.bias, precision=self.precision)


class _LoweredConvolution(nn.modules.conv._ConvNd):
    precision: str

    def forward(self, input: Tensor) -> Tensor:
        padding: Any = self.padding
        if self.padding_mode != "zeros":
            input = functional.pad(
                input, self._reversed_padding_repeated_twice, mode=self.padding_mode
            )
            padding = "valid"
        if isinstance(padding, str):
            sizes = self.kernel_size if padding == "same" else (1,) * len(self.stride)
            widths = [step * (size - 1) for step, size in zip(self.dilation, sizes, strict=True)]
            # As torch, "same" of an odd width pads one element more at the end than at the start.
            if any(width % 2 for width in widths):
                input = functional.pad(input, [n for w in reversed(widths) for n in (0, w % 2)])
            padding = tuple(width // 2 for width in widths)
        geometry = ConvolutionGeometry(self.stride, padding, self.dilation, self.groups)
        return convolve(input, self.weight, self.bias, geometry, precision=self.precision)


class LoweredConv1d(_LoweredConvolution, nn.Conv1d):
    """A convolution in the precision `precision`."""


class LoweredConv2d(_LoweredConvolution, nn.Conv2d):
    """A convolution in the precision `precision`."""


class LoweredConv3d(_LoweredConvolution, nn.Conv3d):
    """A convolution in the precision `precision`."""


class LoweredEmbedding(nn.Embedding):
    """A table whose rows are rounded to the precision `precision` as they are read."""

    precision: str

    def forward(self, input: Tensor) -> Tensor:
        return embed(
            input,
            self.weight,
            self.padding_idx,
            self.scale_grad_by_freq,
            precision=self.precision,
        )


class MatMul(nn.Module):
    """Multiplies two tensors as `torch.matmul` does; a plan may lower it.

    A product written as `a @ b` in a model's forward is no module, so plans leave it in float32.
    Make it one with this class.
    """

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        """Multiplies a [*batch, rows, inner] by b [*batch, inner, columns]."""
        return a @ b


class LoweredMatMul(MatMul):
    """A product in the precision `precision`."""

    precision: str

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return matmul(a, b, precision=self.precision)


_LOWERED: dict[type[nn.Module], type[nn.Module]] = {
    nn.Linear: LoweredLinear,
    nn.Conv1d: LoweredConv1d,
    nn.Conv2d: LoweredConv2d,
    nn.Conv3d: LoweredConv3d,
    nn.Embedding: LoweredEmbedding,
    MatMul: LoweredMatMul,
}
_FLOAT = {lowered: original for original, lowered in _LOWERED.items()}


def list_operators(model: nn.Module) -> dict[str, nn.Module]:
    """Lists the modules that a plan may lower, by name, in the order of `named_modules`.

    A module that has several names counts once, under its first. Embeddings that renormalise their
    rows or have sparse gradients are left out.
    """
    return {name: module for name, module in model.named_modules() if _is_operator(module)}


def list_inputs(args: tuple[Any, ...], words: dict[str, Any]) -> tuple[Any, ...]:
    """Lists the inputs of an operator's call, which may be named: `input`, or `a` and `b`."""
    return (*args, *(words[key] for key in sorted(words)))


def get_precision(module: nn.Module) -> str:
    """Returns the precision that a module computes in."""
    return cast("str", module.precision) if type(module) in _FLOAT else HIGHEST


def set_precision(module: nn.Module, precision: str) -> None:
    """Lets a module of `list_operators` compute in a precision from now on."""
    original = _FLOAT.get(type(module), type(module))
    vars(module).pop("precision", None)
    module.__class__ = original if precision == HIGHEST else _LOWERED[original]
    if precision != HIGHEST:
        cast("Any", module).precision = precision


def _is_operator(module: nn.Module) -> bool:
    if isinstance(module, nn.Embedding) and (module.max_norm is not None or module.sparse):
        return False
    return type(module) in _LOWERED or type(module) in _FLOAT
