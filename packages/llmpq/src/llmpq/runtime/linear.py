"""A linear layer of quantised weights, in the form that is fastest for the tokens at hand.

The same weights serve two phases: a decode step is bound by reading weights, so it computes from the
packed ones; a prefill is bound by arithmetic, so it unpacks them once and runs a dense product. Where
one overtakes the other is measured, see `measure_forms`; the plan carries the table.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import cycle, pairwise
from statistics import median

import torch
from jaxtyping import Float
from torch import Tensor, nn

from llmpq.config import columns_per_scale
from shared.errors import ConfigError
from shared.kernels.weight_matmul import BITS, PackedWeight, from_codes, matmul, unpack

__all__ = [
    "ACTIVATIONS",
    "BLOCK_BYTES",
    "FORMS",
    "QuantLinear",
    "fastest_form",
    "form_for",
    "forms_table",
    "measure_forms",
]

Table = Sequence[Sequence[int | str]]

_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
_TURNS, _MOST_TURNS = 5, 40
_ENOUGH_S = 0.02
"""Seconds of a form after which short calls have no more turns."""
_COLD_BYTES = 64 << 20


def _packed(x: Tensor, weight: PackedWeight) -> Tensor:
    return matmul(x, weight)


def _dense16(x: Tensor, weight: PackedWeight) -> Tensor:
    return _dense(x, weight, torch.bfloat16)


def _dense32(x: Tensor, weight: PackedWeight) -> Tensor:
    return _dense(x, weight, torch.float32)


def _dense(x: Tensor, weight: PackedWeight, dtype: torch.dtype) -> Tensor:
    """Unpacks some rows of the weight at a time: fresh memory would cost more than unpacking does."""
    rows = x.detach().reshape(-1, weight.in_features).to(dtype)
    step = weight.out_features
    if x.device.type == "cpu":
        step = max(64, BLOCK_BYTES // max(1, weight.in_features * dtype.itemsize))
    out = x.new_empty(len(rows), weight.out_features)
    for start in range(0, weight.out_features, step):
        part = unpack(weight.rows(start, start + step), dtype)
        out[:, start : start + step] = rows @ part.t()
    return out.view(*x.shape[:-1], -1)


def _int8(x: Tensor, weight: PackedWeight) -> Tensor:
    """Weights to 8 bits a row, activations to 8 bits a token, both symmetric."""
    w, w_step = _round_rows(unpack(weight))
    rows, x_step = _round_rows(x.detach().reshape(-1, x.shape[-1]).to(torch.float32))
    sums = torch._int_mm(rows, w.t()).to(torch.float32)
    return (sums * x_step * w_step.t()).to(x.dtype).view(*x.shape[:-1], -1)


def _round_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    step = rows.abs().amax(1, keepdim=True).clamp_(min=1e-30) / 127
    return (rows / step).round_().to(torch.int8), step


BLOCK_BYTES = 2 << 20
"""Unpacked weights that a dense form holds at once, on the CPU."""

FORMS: dict[str, Callable[[Tensor, PackedWeight], Tensor]] = {
    "packed": _packed,
    "dense16": _dense16,
    "dense32": _dense32,
    "int8": _int8,
}
"""Forms of a product: from packed weights; unpacked to bfloat16 or float32, then dense; int8 by int8.

dense16 rounds weights and activations to bfloat16; int8 rounds both to 8 bits, and is chosen only where
its loss is counted (`ACTIVATIONS`)."""

ACTIVATIONS = ("float", "int8")
"""What products may round activations to: to bfloat16 at most, or to 8 bits too."""

_DEFAULT: Table = ((1, "packed"), (64, "dense32"))
_DEFAULT_HALF: Table = ((1, "packed"), (48, "dense16"))


def form_for(table: Table, tokens: int) -> str:
    """The form that a table [[from_tokens, form], ...] gives for a number of tokens."""
    chosen = str(table[0][1])
    for first, form in table:
        if int(first) <= tokens:
            chosen = str(form)
    return chosen


def fastest_form(
    *,
    bits: int,
    tokens: int,
    in_features: int,
    out_features: int,
    group_size: int = 128,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
) -> str:
    """The fastest form that changes no result beyond rounding; measured once in a process.

    Args:
        bits: 3, 4 or 8.
        tokens: rows of activations.
        in_features, out_features: the weight's columns and rows.
        group_size: columns that share a scale.
        dtype: of activations.
        device: where the product is computed.

    Raises:
        ConfigError: bits or a size is out of range.
    """
    times = measure_forms(
        bits=bits,
        tokens=(tokens,),
        in_features=in_features,
        out_features=out_features,
        group_size=group_size,
        dtype=dtype,
        device=device,
    )[tokens]
    return min(times, key=times.__getitem__)


def forms_table(times: dict[int, dict[str, float]]) -> list[list[int | str]]:
    """The table [[from_tokens, form], ...] of what `measure_forms` found; the first from 1 token."""
    table: list[list[int | str]] = []
    for tokens in sorted(times):
        form = min(times[tokens], key=times[tokens].__getitem__)
        if not table or table[-1][1] != form:
            table.append([tokens if table else 1, form])
    return table


def synchronise(device: torch.device) -> None:
    """Waits for what a device was given to compute, so that a clock sees it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@lru_cache(maxsize=4096)
def measure_forms(
    *,
    bits: int,
    in_features: int,
    out_features: int,
    tokens: tuple[int, ...] = _TOKENS,
    forms: tuple[str, ...] = ("packed", "dense16", "dense32"),
    group_size: int = 128,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
) -> dict[int, dict[str, float]]:
    """Median seconds of each form by number of tokens, in turns, with weights that no cache holds.

    A layer's weights are used once a step and then those of all others, so copies of the weight, 64 MB
    or 16 of them, take turns from call to call: no form finds those that another has just read. Each turn
    has the forms in another order, as what ran before leaves caches and clocks as it likes. Short calls have more turns, as their seconds vary more.

    Raises:
        ConfigError: a form is unknown, or bits or a size is out of range.
    """
    for form in forms:
        if form not in FORMS:
            raise ConfigError(f"forms: expected some of {', '.join(FORMS)}, got {form!r}")
    if bits not in BITS:
        raise ConfigError(f"bits: expected one of {', '.join(map(str, BITS))}, got {bits}")
    if min(in_features, out_features, *tokens) < 1:
        raise ConfigError(
            f"expected at least 1 token, column and row, got {tokens}, {in_features} and "
            f"{out_features}"
        )
    group_size = columns_per_scale(group_size, in_features)
    groups = -(-in_features // group_size)
    with torch.device(device):
        weight = from_codes(
            torch.randint(0, 1 << bits, (out_features, in_features), dtype=torch.uint8),
            torch.full((out_features, groups), 1e-3),
            torch.full((out_features, groups), 1 << (bits - 1)),
            bits,
            group_size=group_size,
        )
    copies = min(16, max(1, -(-_COLD_BYTES // weight.num_bytes)))
    weights = [weight, *(replace(weight, data=weight.data.clone()) for _ in range(copies - 1))]
    found, turns, order, draw = {}, cycle(weights), list(forms), random.Random(0)
    for count in tokens:
        x = torch.randn(count, in_features, device=device).to(dtype)
        seconds: dict[str, list[float]] = {form: [] for form in forms}
        turn, end = 0, time.perf_counter() + _ENOUGH_S * len(forms)
        while turn <= _TURNS or (turn <= _MOST_TURNS and time.perf_counter() < end):
            draw.shuffle(order)
            for form in order:
                cold = next(turns)
                begun = time.perf_counter()
                FORMS[form](x, cold)
                synchronise(x.device)
                if turn:  # the first compiles
                    seconds[form].append(time.perf_counter() - begun)
            turn += 1
        found[count] = {form: median(values) for form, values in seconds.items()}
    return found


class QuantLinear(nn.Module):
    """x W^T + b with W in groups of integer codes; not differentiable.

    Args:
        packed: the weight.
        bias: float [out], or None.
        forms: which form serves which number of tokens: [[from_tokens, form], ...], ascending,
            the first from 1. None takes packed for few tokens and then a dense product in the
            activations' own precision: nothing is measured, so every process computes alike.

    Raises:
        ConfigError: the table is empty, not ascending, or names an unknown form.
    """

    data: Tensor
    scale: Tensor
    zero: Tensor
    bias: Tensor

    def __init__(
        self, packed: PackedWeight, bias: Tensor | None = None, forms: Table | None = None
    ) -> None:
        super().__init__()
        if forms is not None:
            _check_table(forms)
        self.forms = forms
        self.in_features, self.out_features = packed.in_features, packed.out_features
        self.bits, self.group_size = packed.bits, packed.group_size
        self.register_buffer("data", packed.data)
        self.register_buffer("scale", packed.scale)
        self.register_buffer("zero", packed.zero)
        self.register_buffer("bias", None if bias is None else bias.detach())
        self._packed, self._has_bias = packed, bias is not None

    @property
    def packed(self) -> PackedWeight:
        """The weight.

        It is kept from call to call: Python that no cache holds takes long beside a product of one token.
        """
        kept, now = self._packed, self._buffers  # past the module's own, slow, look-up
        if (
            kept.data is not now["data"]
            or kept.scale is not now["scale"]
            or kept.zero is not now["zero"]
        ):  # moved to another device, or loaded by assignment
            kept = self._packed = replace(kept, data=self.data, scale=self.scale, zero=self.zero)
        return kept

    def forward(self, x: Float[Tensor, "*batch in"]) -> Float[Tensor, "*batch out"]:
        """x [..., in] to [..., out] of x's type."""
        table = self.forms
        if table is None:
            table = _DEFAULT if x.dtype == torch.float32 else _DEFAULT_HALF
        tokens = x.numel() // max(1, self.in_features)
        out = FORMS[form_for(table, tokens)](x, self.packed)
        return out + self.bias.to(out.dtype) if self._has_bias else out

    def extra_repr(self) -> str:
        """What a print of the model shows."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bits={self.bits}, group_size={self.group_size}, bias={self.bias is not None}"
        )


def _check_table(table: Table) -> None:
    try:
        starts = [int(first) for first, _ in table]
    except (TypeError, ValueError):
        starts = []
    if not starts or starts[0] != 1 or any(a >= b for a, b in pairwise(starts)):
        raise ConfigError(
            f"forms: expected [[from_tokens, form], ...] ascending from 1 token, got {table!r}"
        )
    for place, (_, form) in enumerate(table):
        if form not in FORMS:
            raise ConfigError(f"forms[{place}]: expected one of {', '.join(FORMS)}, got {form!r}")
