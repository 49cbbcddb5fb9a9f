"""What a step costs: seconds of a micro-batch by the lengths in it, and how many tokens fit in memory.

Attention between the tokens of a document takes time that grows with the square of its length, all
else grows with the length itself, and each micro-batch has a fixed part. Documents packed into one
micro-batch never attend to each other, so their seconds add up.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields
from math import floor, isfinite
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from shared.errors import ConfigError
from shared.files import read_json, write_atomically

__all__ = [
    "MOST_TOKENS",
    "Cost",
    "Replica",
    "SequenceTooLong",
    "check_cost",
    "check_count",
    "check_lengths",
    "device_name",
    "keep_fitting",
    "token_cap",
    "training_operations",
]

_TOO_LONG = ("raise", "drop", "truncate")
_VERSION = 1
"""Of a cost's file."""
MOST_TOKENS = 1 << 40
"""Of a document: sums over many documents stay exact."""
_ROUND = 128
"""Tokens to a multiple of which caps are rounded down."""
_PASSES = 3.0
"""A dense product forward, and the two of its backward pass."""
_ATTENTION_PASSES = 3.5
"""Two products forward; backward five, as flash attention computes the scores anew."""
_SIZES = {
    "heads": ("num_attention_heads", "n_head", "n_heads", "num_heads"),
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "mlp": ("intermediate_size", "ffn_dim", "ffn_hidden_size", "n_inner", "dff"),
}
"""Names of a model's sizes in its config."""
_ACTIVATION_BYTES = {1: 38, 2: 39, 4: 42, 8: 48}
"""Bytes of a layer's activations for each token and hidden unit of a shard, by tensor-parallel degree
(from the published planner of Hydraulis, for 16-bit training without recomputation)."""


class SequenceTooLong(ConfigError):
    """A sequence that nothing can hold; names its index, its length and the largest cap."""

    def __init__(self, index: int, length: int, cap: int) -> None:
        self.index, self.length, self.cap = index, length, cap
        super().__init__(
            f"sequence {index}: expected at most {cap} tokens, got {length}; give more ranks or "
            f"memory, or cut or drop it (see `too_long=`)"
        )


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Seconds of a micro-batch, forward and backward: the sum of a s^2 + b s over its lengths s, + c.

    Attributes:
        a: seconds for each token squared.
        b: seconds for each token.
        c: seconds of any micro-batch.
        error: mean relative error at the timings it was fitted to; None if it was not fitted.
        largest_error: the largest of them.
        device: kind of device that it was measured on; None if it was not measured.

    Raises:
        ConfigError: a coefficient is negative or not finite, or a and b are both 0.
    """

    a: float
    b: float
    c: float = 0.0
    error: float | None = field(default=None, compare=False)
    largest_error: float | None = field(default=None, compare=False)
    device: str | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        for name in ("a", "b", "c"):
            value = getattr(self, name)
            if not (isfinite(value) and value >= 0):
                raise ConfigError(f"Cost.{name}: expected a finite number, 0 or more, got {value}")
        if not self.a and not self.b:
            raise ConfigError("Cost: expected a or b above 0, got 0 for both; nothing to balance")

    @classmethod
    def fit(cls, timings: Iterable[tuple[Sequence[int] | np.ndarray, float]]) -> Cost:
        """Fits the three coefficients, none negative, to relative errors.

        Args:
            timings: lengths of the documents in a micro-batch, and its seconds.

        Raises:
            ConfigError: fewer than three timings, or seconds that are not above 0.
        """
        from scipy.optimize import nnls

        rows, seconds = [], []
        for number, (lengths, taken_s) in enumerate(timings):
            known = check_lengths(lengths, f"timings[{number}]").astype(float)
            if not (isfinite(taken_s) and taken_s > 0):
                raise ConfigError(
                    f"timings[{number}]: expected seconds above 0, got {taken_s}; measure it anew"
                )
            rows.append((float(known @ known), float(known.sum()), 1.0))
            seconds.append(taken_s)
        if len(rows) < 3:
            raise ConfigError(f"Cost.fit: expected at least 3 timings, got {len(rows)}")
        features, taken = np.array(rows), np.array(seconds)
        scale = features.max(axis=0)
        found, _ = nnls(features / scale / taken[:, None], np.ones(len(taken)))
        errors = np.abs(features / scale @ found / taken - 1)
        a, b, c = (float(value) for value in found / scale)
        return cls(a=a, b=b, c=c, error=float(errors.mean()), largest_error=float(errors.max()))

    @classmethod
    def of_model(cls, config: Any, operations_per_s: float = 1e12, fixed_s: float = 0.0) -> Cost:
        """The cost of a model's micro-batches from its shape alone: operations over a rate.

        Ranks are balanced by ratios of seconds, so the rate matters little; that attention and dense
        products run at one rate is an assumption, which measuring spares.

        Args:
            config: see `training_operations`.
            operations_per_s: that a rank really computes.
            fixed_s: seconds of any micro-batch.
        """
        squared, linear = training_operations(config)
        return cls(a=squared / operations_per_s, b=linear / operations_per_s, c=fixed_s)

    def save(self, path: str | Path) -> None:
        """Writes it as JSON, replacing `path` at once."""
        write_atomically(path, json.dumps({"version": _VERSION, **asdict(self)}, indent=1) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Cost:
        """Reads what `save` wrote.

        Raises:
            ConfigError: it is no cost, one of another version, or one with unknown keys; names the file.
            DataError: there is no such file, or it is no JSON.
        """
        tree = read_json(path, "a cost")
        version = tree.pop("version", None) if isinstance(tree, dict) else None
        if version != _VERSION:
            raise ConfigError(
                f"{path}: expected a cost of version {_VERSION}, got {version!r}; measure it anew, see "
                f"`measure_cost`"
            )
        if unknown := tree.keys() - {one.name for one in fields(cls)}:
            raise ConfigError(
                f"{path}: expected a cost of a, b and c, got {', '.join(sorted(unknown))} too; measure it "
                f"anew, see `measure_cost`"
            )
        try:
            return cls(**tree)
        except (ConfigError, TypeError) as error:
            raise ConfigError(f"{path}: expected a cost: {error}") from error

    def check_device(self, device: Any) -> None:
        """Refuses a cost that was measured on another kind of device than a `torch.device`.

        Raises:
            ConfigError: it was; says where.
        """
        if self.device is not None and device_name(device) != self.device:
            raise ConfigError(
                f"cost: expected one of {device_name(device)}, got one that was measured on {self.device}; "
                f"measure it anew, see `measure_cost`"
            )

    def sequence_s(self, lengths: Sequence[int] | np.ndarray) -> Float[np.ndarray, " sequence"]:
        """Seconds that each sequence adds to its micro-batch."""
        known = np.asarray(lengths, dtype=float)
        return known * (self.a * known + self.b)

    def micro_batch_s(self, lengths: Sequence[int] | np.ndarray) -> float:
        """Seconds of a micro-batch of these documents; 0 without any."""
        return float(self.sequence_s(lengths).sum() + self.c) if len(lengths) else 0.0


def device_name(device: Any) -> str:
    """The kind of a `torch.device`: a GPU's name, or its type."""
    if device.type != "cuda":
        return str(device.type)
    import torch

    return torch.cuda.get_device_name(device)


def training_operations(config: Any) -> tuple[float, float]:
    """Operations of training a decoder, forward and backward.

    Args:
        config: of a Hugging Face causal LM; counted as of the Llama kind: gated MLP, grouped query
            heads.

    Returns:
        Operations for each token squared (causal attention of a document), and for each token.

    Raises:
        ConfigError: the config lacks a size; names it.
    """
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    heads, hidden = _size(config, "heads"), _size(config, "hidden")
    head_dim = getattr(config, "head_dim", None) or hidden // heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    projections = hidden * head_dim * (2 * heads + 2 * kv_heads)
    mlp = 3 * hidden * _size(config, "mlp", default=4 * hidden)
    layers = _size(config, "layers")
    weights = layers * (projections + mlp) + config.vocab_size * hidden
    # Half of the pairs of tokens, two products of 2 operations a pair and head unit.
    return _ATTENTION_PASSES * layers * 2.0 * heads * head_dim, _PASSES * 2.0 * weights


def _size(config: Any, kind: str, default: int | None = None) -> int:
    """A size of a model under any of the names that families give it."""
    for name in _SIZES[kind]:
        value = getattr(config, name, None)
        if isinstance(value, int) and value > 0:
            return value
    if default is None:
        raise ConfigError(
            f"cost: expected a model's config with {_SIZES[kind][0]}, got {type(config).__name__} without; "
            f"give a cost=hy.Cost(a=..., b=...), or one that is fitted to timings, see Cost.fit"
        )
    return default


@dataclass(frozen=True, kw_only=True)
class Replica:
    """Ranks that train one copy of the model together.

    Attributes:
        cost: seconds of a micro-batch on its slowest stage.
        cap: most tokens in a micro-batch.
        stages: pipeline stages.

    Raises:
        ConfigError: cap or stages below 1.
    """

    cost: Cost
    cap: int
    stages: int = 1

    def __post_init__(self) -> None:
        for name in ("cap", "stages"):
            if getattr(self, name) < 1:
                raise ConfigError(f"Replica.{name}: expected at least 1, got {getattr(self, name)}")


def check_count(name: str, value: Any) -> None:
    """Refuses what is not a whole number of at least 1.

    Raises:
        ConfigError: it is not; names the argument.
    """
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise ConfigError(f"{name}: expected a whole number, got {value!r}")
    if value < 1:
        raise ConfigError(f"{name}: expected at least 1, got {value}")


def check_cost(cost: Any, *, is_required: bool = False) -> None:
    """Refuses what is not a `Cost`; None stands for the model's shape unless one is required.

    Raises:
        ConfigError: it is another object.
    """
    if not isinstance(cost, Cost) and (is_required or cost is not None):
        raise ConfigError(
            f"cost: expected a Cost, got {cost!r}; measure one by measure_cost, or fit one to timings by "
            f"Cost.fit"
        )


def check_lengths(lengths: Sequence[float] | np.ndarray, name: str = "lengths") -> np.ndarray:
    """Lengths as int64.

    Raises:
        ConfigError: one is not a whole number above 0; says which.
    """
    try:
        found = np.asarray(lengths)
        numbers = found.astype(float)
    except (TypeError, ValueError, OverflowError) as error:
        raise ConfigError(f"{name}: expected a sequence of whole numbers, got {error}") from error
    if found.ndim != 1:
        raise ConfigError(f"{name}: expected a sequence of lengths, got the shape {found.shape}")
    if not found.size:
        return np.zeros(0, dtype=np.int64)
    wrong = ~(np.isfinite(numbers) & (numbers >= 1) & (numbers == np.floor(numbers)))
    wrong |= numbers > MOST_TOKENS
    if wrong.any():
        at = int(wrong.argmax())
        raise ConfigError(
            f"{name}[{at}]: expected a whole number of tokens above 0 and at most {MOST_TOKENS}, got "
            f"{found[at]}"
        )
    return found.astype(np.int64)


def keep_fitting(lengths: np.ndarray, most: int, too_long: str) -> np.ndarray:
    """Indices of the documents that are trained on: those of at most so many tokens, or cut to these.

    Args:
        lengths: tokens of the documents.
        most: that a document may have.
        too_long: what becomes of longer ones: "raise", "drop", or "truncate" by the caller.

    Raises:
        SequenceTooLong: there is a longer one and it is neither to be dropped nor cut.
        ConfigError: no document is left, or `too_long` is another word.
    """
    if too_long not in _TOO_LONG:
        raise ConfigError(f"too_long: expected one of {', '.join(_TOO_LONG)}, got {too_long!r}")
    long = np.flatnonzero(lengths > most)
    if len(long) and too_long == "raise":
        raise SequenceTooLong(int(long[0]), int(lengths[long[0]]), most)
    kept = np.flatnonzero(lengths <= most) if too_long == "drop" else np.arange(len(lengths))
    if not len(kept):
        raise ConfigError(
            f"expected a document of at most {most} tokens, got none of {len(lengths)}"
        )
    return kept


def token_cap(
    *,
    hidden: int,
    layers: int,
    vocab: int,
    tp: int,
    pp: int,
    optimizer: tuple[int, int, int],
    memory_bytes: float,
    reserve_bytes: float,
    state_bytes: float = 197,
    sharded: float = 0.75,
) -> int:
    """Most tokens in a micro-batch of a replica, from the memory that states and activations take.

    The memory model of Hydraulis (arXiv 2412.07894, by its published planner): parameters, gradients
    and optimizer states, of which a share is sharded in the optimizer's own layout, and activations.
    The first stage of a 1F1B pipeline keeps as many micro-batches as there are stages, each with its
    share of the layers, so that activations do not fall with `pp`.

    Args:
        hidden: hidden size.
        layers: decoder layers.
        vocab: tokens of the vocabulary.
        tp, pp: tensor- and pipeline-parallel degrees of the replica.
        optimizer: data-, tensor- and pipeline-parallel degrees of the optimizer's layout.
        memory_bytes: of a device.
        reserve_bytes: kept free.
        state_bytes: bytes of all states of a layer for each hidden unit squared.
        sharded: share of the states that lies in the optimizer's layout.

    Returns:
        Tokens, rounded down to a multiple of 128; 0 if states alone do not fit.

    Raises:
        ConfigError: an argument below its least value, or a tensor-parallel degree whose activations
            were not published.
    """
    dp_o, tp_o, pp_o = optimizer
    for name, value in {
        "hidden": hidden, "layers": layers, "vocab": vocab, "pp": pp,
        "optimizer[0]": dp_o, "optimizer[1]": tp_o, "optimizer[2]": pp_o,
    }.items():  # fmt: skip
        if value < 1:
            raise ConfigError(f"token_cap: {name}: expected at least 1, got {value}")
    if tp not in _ACTIVATION_BYTES:
        raise ConfigError(f"token_cap: tp: expected one of 1, 2, 4 and 8, got {tp}")
    if not 0 <= sharded <= 1:
        raise ConfigError(f"token_cap: sharded: expected a share from 0 to 1, got {sharded}")
    layer, ends = state_bytes * hidden**2, hidden * vocab
    states = (
        layers / pp_o * layer / tp_o * sharded / dp_o
        + layers / pp * layer / tp * (1 - sharded)
        + ends / tp_o * _end_bytes(pp_o) * sharded / dp_o
        + ends / tp * _end_bytes(pp) * (1 - sharded)
    )
    token_bytes = layers * hidden / tp * _ACTIVATION_BYTES[tp]
    tokens = floor((memory_bytes - reserve_bytes - states) / token_bytes)
    return max(tokens // _ROUND * _ROUND, 0)


def _end_bytes(pp: int) -> int:
    """Bytes for each entry of the embedding: twice with one stage, which holds the head too."""
    return 32 if pp == 1 else 16
