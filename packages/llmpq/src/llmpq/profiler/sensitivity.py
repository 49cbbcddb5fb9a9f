"""How much each layer's rounding changes what a model says, in nats a token, by width.

Rounding weights by e moves the next-token distribution p to q. To second order the divergence
KL(p || q) is half of e^T F e, where F is the Fisher information of p; with rounding errors that are
independent of each other, the diagonal of F is enough, and noise adds up over layers. The diagonal
comes from squared gradients of the summed log-likelihood of tokens drawn from p itself: a sequence's
tokens are independent given their past, so one backward pass a sequence serves all its tokens and
all widths. The indicator of LLM-PQ (arXiv 2403.01136, variance of the rounded output) is kept for
comparison, as are measured divergences, one layer at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from llmpq.config import columns_per_scale
from llmpq.profiler import SENSITIVITIES
from llmpq.runtime.gptq import find_matrices
from llmpq.runtime.linear import QuantLinear
from shared.errors import ConfigError, DataError
from shared.kernels import weight_matmul
from shared.kernels.weight_matmul import PackedWeight

__all__ = [
    "Sensitivity",
    "by_fisher",
    "by_int8",
    "by_kl",
    "by_random",
    "by_variance",
    "divergence",
    "output_noise",
    "predict",
    "read_batches",
    "round_to_nearest",
    "sensitivity",
]


# Logits of that many tokens are small beside a model; more would save little time.
_TOKENS_OF_A_PASS = 512

Matrices = list[list[nn.Linear]]
Batches = list[tuple[Tensor, Tensor]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Sensitivity:
    """Noise of each layer at each width.

    Attributes:
        noise: [layer, width]; nats a token for "fisher" and "kl", in units of their own otherwise.
        bits: widths, as given.
        group_size: columns that share a scale.
        method: how it was measured.
        num_tokens: tokens it was measured on.
    """

    noise: np.ndarray
    bits: tuple[int, ...]
    group_size: int
    method: str
    num_tokens: int


def sensitivity(
    model: nn.Module,
    batches: Iterable[Any],
    method: str = "fisher",
    *,
    bits: Sequence[int] = (3, 4, 8, 16),
    group_size: int = 128,
    seed: int = 0,
) -> Sensitivity:
    """Measures the noise of a Hugging Face causal LM's layers.

    Args:
        model: the unquantised model; its weights and gradients are left as they were.
        batches: token ids [sequences, tokens], or mappings with `input_ids` and perhaps an
            `attention_mask`. A few hundred tokens are enough for "fisher".
        method: "fisher" estimates nats from squared gradients, in seconds; "kl" measures nats, a layer
            and width at a time; "int8" measures what products in 8 bits add; "variance" is LLM-PQ's
            indicator (arXiv 2403.01136), in units of its own; "random" is for comparison.
        bits: widths; 16 has no noise.
        group_size: columns that share a scale.
        seed: of the tokens drawn, and of "random".

    Raises:
        ConfigError: the method, a width or the model's family is unknown.
        DataError: there are no tokens, or a weight is not finite.
    """
    measure = SENSITIVITIES.get(method)
    unknown = [width for width in bits if width not in (*weight_matmul.BITS, 16)]
    if unknown or not bits:
        raise ConfigError(f"bits: expected some of 3, 4, 8 and 16, got {list(bits)}")
    found = read_batches(batches)
    layers = find_matrices(model)
    was_training = model.training
    model.eval()
    try:
        noise = measure(model, layers, found, tuple(bits), group_size, seed)
    finally:
        model.train(was_training)
    return Sensitivity(
        noise=noise,
        bits=tuple(bits),
        group_size=group_size,
        method=method,
        num_tokens=sum(int(mask.sum()) for _, mask in found),
    )


def output_noise(
    weight: Float[Tensor, "out in"],
    second_moment: Float[Tensor, " in"],
    *,
    bits: int,
    group_size: int = 128,
) -> float:
    """The expected squared change of a token's output, E ||dy||^2, from rounding a weight.

    Rounding errors are taken as uniform in a step, step^2 / 12, and independent; the inputs need not
    have mean 0, as their second moment counts.

    Args:
        weight: the weight.
        second_moment: mean of the square of each input.
        bits: width.
        group_size: columns that share a scale.
    """
    group_size = columns_per_scale(group_size, weight.shape[1])
    packed = weight_matmul.pack(weight, bits, group_size=group_size)
    group = torch.arange(weight.shape[1], device=weight.device) // group_size
    moments = torch.zeros(packed.scale.shape[1], dtype=torch.float64, device=weight.device)
    moments.index_add_(0, group, second_moment.double())
    return float((packed.scale.double().square() / 12 * moments).sum())


@contextmanager
def round_to_nearest(model: nn.Module, bits: Sequence[int], *, group_size: int) -> Iterator[None]:
    """Rounds a model's layers in place, and puts their weights back at the end.

    Args:
        model: a Hugging Face causal LM.
        bits: width of each layer; 16 leaves it as it is.
        group_size: columns that share a scale.
    """
    kept: list[tuple[nn.Linear, Tensor]] = []
    try:
        for layer, width in zip(find_matrices(model), bits, strict=True):
            for module in layer if width < 16 else ():
                weight = module.weight.data
                kept.append((module, weight))
                packed = _pack(weight, width, group_size)
                module.weight.data = weight_matmul.unpack(packed).to(weight.dtype)
        yield
    finally:
        for module, weight in kept:
            module.weight.data = weight


@torch.no_grad()
def predict(model: nn.Module, batches: Batches) -> list[Tensor]:
    """Logarithms of next-token probabilities [tokens, vocabulary] of each batch."""
    return [_log_probs(model, ids, mask) for ids, mask in batches]


@torch.no_grad()
def divergence(model: nn.Module, batches: Batches, expected: Sequence[Tensor]) -> float:
    """Mean KL(expected || model) in nats a token.

    Args:
        model: the model to compare.
        batches: from `read_batches`.
        expected: what `predict` gave for the same batches with the unquantised model.
    """
    total, num_tokens = 0.0, 0
    for (ids, mask), known in zip(batches, expected, strict=True):
        found = _log_probs(model, ids, mask)
        # p log(p/q) - p + q: the last two cancel in the sum, and no token's share is negative.
        change = (found - known).double()
        total += float((known.exp() * (change.expm1() - change)).sum())
        num_tokens += len(found)
    return total / num_tokens


def read_batches(batches: Iterable[Any]) -> Batches:
    """Token ids and mask of each batch.

    Args:
        batches: token ids [sequences, tokens], or mappings with `input_ids` and perhaps an
            `attention_mask`.

    Raises:
        DataError: there are no tokens.
    """
    found = [_read_batch(batch) for batch in batches]
    if not any(bool(mask.any()) for _, mask in found):
        raise DataError("expected batches with tokens, got none; give some text of your own kind")
    return found


def _read_batch(batch: Any) -> tuple[Tensor, Tensor]:
    """Token ids and the mask of those that count."""
    ids = batch if isinstance(batch, Tensor) else batch["input_ids"]
    mask = None if isinstance(batch, Tensor) else batch.get("attention_mask")
    return ids, torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()


def by_fisher(
    model: nn.Module, layers: Matrices, batches: Batches, bits: tuple[int, ...], group_size: int,
    seed: int,
) -> np.ndarray:  # fmt: skip
    """Half of the squared rounding errors times squared gradients, see the module."""
    squares, num_tokens = _squared_gradients(model, layers, batches, seed)
    noise = np.zeros((len(layers), len(bits)))
    for number, layer in enumerate(layers):
        for module in layer:
            for column, width in enumerate(bits):
                if width < 16:
                    error = _squared_error(module.weight, width, group_size)
                    noise[number, column] += 0.5 * float(error.mul_(squares[module]).sum())
    return noise / num_tokens


def _squared_gradients(
    model: nn.Module, layers: Matrices, batches: Batches, seed: int
) -> tuple[dict[nn.Module, Tensor], int]:
    """Sums over sequences of each weight's squared gradient, and the number of tokens.

    Several sequences go through the model at once. A sequence's gradient of one weight is made from
    the weight's inputs and the gradient of its outputs, squared while it is in the cache, and
    forgotten: no gradient of the whole model is ever held.
    """
    squares: dict[nn.Module, Tensor] = {
        module: torch.zeros_like(module.weight, dtype=torch.float32)
        for layer in layers
        for module in layer
    }
    entered: list[Tensor] = []

    def enter(_module: nn.Module, _inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        entered.append(output.detach().requires_grad_(True))
        return entered[-1]

    def note(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        x = inputs[0].detach()

        def add(gradient: Tensor) -> None:
            # OPT hands its matrices all sequences' tokens as one list.
            rows = [part.reshape(num_rows, -1, part.shape[-1]).float() for part in (gradient, x)]
            for out, into in zip(*rows, strict=True):
                weight_gradient = out.T @ into
                squares[module].addcmul_(weight_gradient, weight_gradient)

        output.register_hook(add)

    embedding: nn.Module = cast(Any, model).get_input_embeddings()
    hooks = [embedding.register_forward_hook(enter)]
    hooks += [module.register_forward_hook(note) for module in squares]
    generator, num_tokens = torch.Generator().manual_seed(seed), 0
    try:
        for ids, mask in _passes(batches):
            num_rows = len(ids)
            logits = model(input_ids=ids, attention_mask=mask.long()).logits.float()[mask]
            drawn = torch.multinomial(logits.detach().softmax(-1).cpu(), 1, generator=generator)
            loss = nn.functional.cross_entropy(
                logits, drawn[:, 0].to(logits.device), reduction="sum"
            )
            torch.autograd.grad(loss, entered.pop())
            num_tokens += len(logits)
    finally:
        for hook in hooks:
            hook.remove()
    return squares, num_tokens


def by_variance(
    model: nn.Module, layers: Matrices, batches: Batches, bits: tuple[int, ...], group_size: int,
    seed: int,
) -> np.ndarray:  # fmt: skip
    """LLM-PQ's indicator: step squared times the variance of a matrix's inputs, over 4."""
    sums: dict[nn.Module, tuple[int, Tensor, Tensor]] = {}

    def note(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        x = inputs[0].detach().double().reshape(-1, inputs[0].shape[-1])
        count, total, square = sums.get(module, (0, torch.zeros(()), torch.zeros(())))
        sums[module] = count + x.numel(), total + x.sum(), square + x.square().sum()

    hooks = [m.register_forward_pre_hook(note) for layer in layers for m in layer]
    try:
        with torch.no_grad():
            for ids, mask in _passes(batches):
                model(input_ids=ids, attention_mask=mask.long())
    finally:
        for hook in hooks:
            hook.remove()
    noise = np.zeros((len(layers), len(bits)))
    for number, layer in enumerate(layers):
        for module in layer:
            count, total, square = sums[module]
            variance = float(square / count - (total / count) ** 2)
            weight = module.weight.detach()
            span = float(weight.max() - weight.min())
            for column, width in enumerate(bits):
                if width < 16:
                    step = span / (2 ** (width - 1) - 1)
                    noise[number, column] += module.in_features * step**2 * variance / 4
    return noise


def by_kl(
    model: nn.Module, layers: Matrices, batches: Batches, bits: tuple[int, ...], group_size: int,
    seed: int,
) -> np.ndarray:  # fmt: skip
    """The measured divergence of the model with one layer rounded, for each layer and width."""
    noise, untouched = np.zeros((len(layers), len(bits))), [16] * len(layers)
    expected = predict(model, batches)
    for number in range(len(layers)):
        for column, width in enumerate(bits):
            if width < 16:
                plan = [*untouched[:number], width, *untouched[number + 1 :]]
                with round_to_nearest(model, plan, group_size=group_size):
                    noise[number, column] = divergence(model, batches, expected)
    return noise


def by_int8(
    model: nn.Module, layers: Matrices, batches: Batches, bits: tuple[int, ...], group_size: int,
    seed: int,
) -> np.ndarray:  # fmt: skip
    """Measured divergence between a layer's rounded weights in 8-bit products and in float32 ones.

    Rounding errors of weights and of products are independent, so that this adds to a width's own noise.
    """
    noise = np.zeros((len(layers), len(bits)))
    for number, layer in enumerate(layers):
        for column, width in enumerate(bits):
            if width == 16:
                continue
            with _computed(layer, width, group_size, "dense32"):
                expected = predict(model, batches)
            with _computed(layer, width, group_size, "int8"):
                noise[number, column] = divergence(model, batches, expected)
    return noise


@contextmanager
def _computed(layer: list[nn.Linear], bits: int, group_size: int, form: str) -> Iterator[None]:
    """Has matrices compute with rounded weights, in one form of product."""
    try:
        for module in layer:
            packed = _pack(module.weight, bits, group_size)
            rounded = QuantLinear(packed, module.bias, [[1, form]])
            module.forward = rounded.forward  # type: ignore[method-assign]
        yield
    finally:
        for module in layer:
            module.__dict__.pop("forward", None)


def by_random(
    model: nn.Module, layers: Matrices, batches: Batches, bits: tuple[int, ...], group_size: int,
    seed: int,
) -> np.ndarray:  # fmt: skip
    """Draws, for comparison: a layer's are in one proportion at all widths."""
    draws = np.random.default_rng(seed).random((len(layers), 1))
    steps = np.array([0.0 if width == 16 else 4.0**-width for width in bits])
    return draws * steps


def _squared_error(weight: Tensor, bits: int, group_size: int) -> Tensor:
    """Squares of what rounding changes; weights on a grid of their own may change less than most."""
    weight = weight.detach()
    packed = _pack(weight, bits, group_size)
    return (weight_matmul.unpack(packed) - weight.float()).square_()


def _pack(weight: Tensor, bits: int, group_size: int) -> PackedWeight:
    columns = columns_per_scale(group_size, weight.shape[1])
    return weight_matmul.pack(weight, bits, group_size=columns)


def _passes(batches: Batches) -> Iterator[tuple[Tensor, Tensor]]:
    """As many sequences as a pass through the model takes; those without tokens are left out."""
    for ids, mask in batches:
        ids, mask = ids[mask.any(1)], mask[mask.any(1)]
        step = max(1, _TOKENS_OF_A_PASS // ids.shape[1])
        for row in range(0, len(ids), step):
            yield ids[row : row + step], mask[row : row + step]


def _log_probs(model: nn.Module, ids: Tensor, mask: Tensor) -> Tensor:
    return model(input_ids=ids, attention_mask=mask.long()).logits.float()[mask].log_softmax(-1)
