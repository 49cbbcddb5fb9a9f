"""Rounding that makes up for its own errors: GPTQ (arXiv 2210.17323), layer by layer.

Columns are rounded one after another; each one's error is spread over those not yet rounded, so that
the layer's outputs on calibration text change least. The inputs of a layer are those that the rounded
layers before it produce. Where we depart: scales and zero points are
those of rounding to nearest, over a narrower range where that lowers the error, and fixed before the
first column, so that columns can go by descending second moment of their inputs while groups stay
contiguous, as kernels and exports need.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from llmpq.config import ModelSpec, columns_per_scale
from shared.errors import ConfigError, DataError
from shared.files import atomic_file
from shared.kernels import weight_matmul
from shared.kernels.weight_matmul import PackedWeight

__all__ = [
    "find_layers",
    "find_matrices",
    "fit_ranges",
    "gptq",
    "read_codes",
    "round_model",
    "write_codes",
]

_BLOCK = 128
_SHARES = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65)


def gptq(
    weight: Float[Tensor, "out in"],
    gram: Float[Tensor, "in in"],
    bits: int,
    *,
    group_size: int = 128,
    damping: float = 0.01,
) -> PackedWeight:
    """Rounds a weight so that its outputs on given inputs change least.

    Args:
        weight: the weight.
        gram: sum of x x^T over inputs x, up to a factor. Inputs that are always 0 may stay so.
        bits: 3, 4 or 8.
        group_size: columns that share a scale.
        damping: share of the mean diagonal that is added to the diagonal.

    Raises:
        ConfigError: bits, group_size or damping is out of range.
        DataError: the weight or the gram is not finite.
    """
    if not damping > 0:
        raise ConfigError(f"damping: expected more than 0, got {damping}")
    group_size = columns_per_scale(group_size, weight.shape[1])
    nearest = weight_matmul.pack(weight, bits, group_size=group_size)
    if not bool(gram.isfinite().all()):
        raise DataError("expected a finite gram, got one that is not; inspect calibration inputs")
    gram = gram.double()
    diagonal = gram.diagonal()
    mean = float(diagonal.mean())
    if mean <= 0:
        return nearest  # no input, so no error to make up for
    nearest = fit_ranges(weight, diagonal, bits, group_size=group_size)
    order = diagonal.argsort(descending=True)
    damped = gram[order][:, order]
    damped.diagonal().add_(damping * mean)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped))
    # Row i: how column i's error is spread over columns i and after, given those before.
    spread = torch.linalg.cholesky(inverse, upper=True).to(torch.float32)

    rest = weight.detach().to(torch.float32)[:, order]
    group = order // group_size
    scale = nearest.scale.to(torch.float32)[:, group]
    zero = nearest.zero.to(torch.float32)[:, group]
    found = torch.empty_like(rest)
    for start in range(0, rest.shape[1], _BLOCK):
        stop = min(start + _BLOCK, rest.shape[1])
        errors = torch.empty_like(rest[:, start:stop])
        for column in range(start, stop):
            step, offset = scale[:, column], zero[:, column]
            code = (rest[:, column] / step).round_().add_(offset).clamp_(0, (1 << bits) - 1)
            found[:, column] = code
            error = (rest[:, column] - (code - offset) * step) / spread[column, column]
            rest[:, column:stop].addr_(error, spread[column, column:stop], alpha=-1)
            errors[:, column - start] = error
        rest[:, stop:].addmm_(errors, spread[start:stop, stop:], alpha=-1)
    codes = torch.empty_like(found)
    codes[:, order] = found
    return weight_matmul.from_codes(
        codes.to(torch.uint8), nearest.scale, nearest.zero, bits, group_size=group_size
    )


def fit_ranges(
    weight: Float[Tensor, "out in"],
    importance: Float[Tensor, " in"],
    bits: int,
    *,
    group_size: int = 128,
) -> PackedWeight:
    """Rounds to nearest over the share of each group's range that has the least squared error.

    Args:
        weight: the weight.
        importance: factor of each column's squared errors.
        bits: 3, 4 or 8.
        group_size: columns that share a scale.
    """
    weight = weight.detach().to(torch.float32)
    columns = weight.shape[1]
    group_size = columns_per_scale(group_size, columns)
    group = torch.arange(columns, device=weight.device) // group_size
    best = weight_matmul.pack(weight, bits, group_size=group_size)
    top = torch.zeros_like(best.scale, dtype=torch.float32)
    where = group.expand_as(weight)
    high = top.scatter_reduce(1, where, weight, "amax")[:, group]
    low = top.scatter_reduce(1, where, weight, "amin")[:, group]
    scale, zero, least = best.scale, best.zero, torch.full_like(top, torch.inf)
    for share in _SHARES:
        narrow = torch.minimum(torch.maximum(weight, low * share), high * share)
        found = weight_matmul.pack(narrow, bits, group_size=group_size)
        squares = (weight_matmul.unpack(found) - weight).square_() * importance.float()
        error = top.index_add(1, group, squares)
        is_better = error < least
        least = torch.where(is_better, error, least)
        scale = torch.where(is_better, found.scale, scale)
        zero = torch.where(is_better, found.zero, zero)
    step, offset = scale.float()[:, group], zero.float()[:, group]
    codes = ((weight / step).round_() + offset).clamp_(0, (1 << bits) - 1)
    return weight_matmul.from_codes(codes.to(torch.uint8), scale, zero, bits, group_size=group_size)


@torch.no_grad()
def round_model(
    model: nn.Module,
    batches: Iterable[Tensor],
    bits: Sequence[int],
    *,
    group_size: int = 128,
    on_layer: Callable[[int], None] = lambda number: None,
) -> dict[str, PackedWeight]:
    """Rounds a Hugging Face causal LM's layers by GPTQ, first to last.

    Args:
        model: on return its weights are the rounded ones.
        batches: token ids [sequences, tokens] of calibration text, without padding.
        bits: width of each layer; 16 leaves it as it is.
        group_size: columns that share a scale.
        on_layer: called with the number of each layer before its turn.

    Returns:
        The rounded matrices by their modules' names.

    Raises:
        ConfigError: the model's family is unknown, or bits are not one a layer.
        DataError: there is no text, or a weight is not finite; names the matrix.
    """
    layers, matrices = find_layers(model), find_matrices(model)
    if len(bits) != len(layers):
        raise ConfigError(f"bits: expected one of each of {len(layers)} layers, got {len(bits)}")
    calls, inputs = _record_calls(model, layers, batches)
    if not inputs:
        raise DataError("expected batches with tokens, got none; give some text of your own kind")
    names = {module: name for name, module in model.named_modules()}
    packed = {}
    for number, (layer, found, width) in enumerate(zip(layers, matrices, bits, strict=True)):
        on_layer(number)
        if width < 16:
            grams = _grams(layer, found, list(zip(inputs, calls[number], strict=True)))
            for module in found:
                try:
                    rounded = gptq(module.weight, grams[module], width, group_size=group_size)
                except DataError as error:
                    raise DataError(f"{names[module]}.weight: {error}") from error
                packed[names[module]] = rounded
                module.weight.data = weight_matmul.unpack(rounded).to(module.weight.dtype)
        inputs = [
            _first(layer(x, *given, **named))
            for x, (given, named) in zip(inputs, calls[number], strict=True)
        ]
    return packed


def find_layers(model: nn.Module) -> nn.ModuleList:
    """The decoder layers of a Hugging Face causal LM.

    Raises:
        ConfigError: the model is of no family that can be planned.
    """
    spec = ModelSpec.from_hf(model.config)
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == spec.num_layers:
            return module
    raise ConfigError(f"expected a list of {spec.num_layers} decoder layers, found none")


def find_matrices(model: nn.Module) -> list[list[nn.Linear]]:
    """The matrices of each decoder layer that a plan may round."""
    names = [matrix.name for matrix in ModelSpec.from_hf(model.config).matrices]
    found = [[layer.get_submodule(name) for name in names] for layer in find_layers(model)]
    return [[module for module in layer if isinstance(module, nn.Linear)] for layer in found]


def write_codes(path: str | Path, packed: Mapping[str, PackedWeight]) -> None:
    """Writes rounded matrices by name as safetensors, replacing `path` at once."""
    from safetensors.torch import save_file

    tensors = {}
    for name, weight in packed.items():
        tensors[f"{name}.codes"] = weight_matmul.codes(weight)
        tensors[f"{name}.scale"], tensors[f"{name}.zero"] = weight.scale, weight.zero
    widths = {name: str(weight.bits) for name, weight in packed.items()}
    with atomic_file(Path(path)) as partial:
        save_file(tensors, partial, metadata=widths)


def read_codes(file: Any, name: str, bits: int, *, group_size: int = 128) -> PackedWeight:
    """Reads one matrix that `write_codes` wrote.

    Args:
        file: the file, opened by `safetensors.safe_open`.
        name: the matrix's module.
        bits: its width.
        group_size: columns that share a scale.

    Raises:
        DataError: the file lacks the matrix, or holds it at another width or group size.
    """
    known = set(file.keys())
    parts = []
    for part in ("codes", "scale", "zero"):
        if f"{name}.{part}" not in known:
            raise DataError(
                f"expected {name}.{part} among the rounded matrices, got {len(known)} others; "
                f"round the model again for this plan"
            )
        parts.append(file.get_tensor(f"{name}.{part}"))
    written = (file.metadata() or {}).get(name)
    if written != str(bits):
        raise DataError(
            f"{name}: expected codes of {bits} bits, got {written}; round the model again for this plan"
        )
    try:
        codes, scale, zero = parts
        group_size = columns_per_scale(group_size, codes.shape[1])
        return weight_matmul.from_codes(codes, scale, zero, bits, group_size=group_size)
    except DataError as error:
        raise DataError(f"{name}: {error}") from error


_Call = tuple[tuple[Any, ...], dict[str, Any]]


def _record_calls(
    model: nn.Module, layers: nn.ModuleList, batches: Iterable[Tensor]
) -> tuple[list[list[_Call]], list[Tensor]]:
    """Records what each layer is called with, beside hidden states, and the first layer's hidden states.

    Layers may differ in it: those with a sliding window have masks of their own.

    Returns:
        The other arguments of each layer's calls, a list a layer, and the first one's hidden states.
    """
    calls: list[list[_Call]] = [[] for _ in layers]
    inputs: list[Tensor] = []
    hooks = []
    for number, layer in enumerate(layers):

        def record(
            _layer: nn.Module, given: tuple[Any, ...], named: dict[str, Any], number: int = number
        ) -> None:
            calls[number].append((given[1:], named))
            if number == 0:
                inputs.append(given[0])

        hooks.append(layer.register_forward_pre_hook(record, with_kwargs=True))
    try:
        for batch in batches:
            model(input_ids=batch, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return calls, inputs


def _grams(
    layer: nn.Module, matrices: Sequence[nn.Linear], calls: Sequence[tuple[Tensor, _Call]]
) -> dict[nn.Module, Tensor]:
    """Sum of x x^T over a layer's inputs, of each matrix."""
    grams: dict[nn.Module, Tensor] = {
        m: torch.zeros(m.in_features, m.in_features, device=m.weight.device) for m in matrices
    }

    def add(module: nn.Module, given: tuple[Tensor, ...]) -> None:
        rows = given[0].reshape(-1, given[0].shape[-1]).float()
        grams[module].addmm_(rows.t(), rows)

    hooks = [m.register_forward_pre_hook(add) for m in matrices]
    try:
        for x, (given, named) in calls:
            layer(x, *given, **named)
    finally:
        for hook in hooks:
            hook.remove()
    return grams


def _first(found: Any) -> Tensor:
    return found[0] if isinstance(found, tuple) else found
