"""Bytes that would travel if a backbone were cut behind each of its layers."""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

import torch
from torch import Tensor

from diffusionpipe.job.layers import ChainLayer
from shared.errors import ConfigError

__all__ = ["Cut", "count_cuts"]


@dataclass(frozen=True, slots=True)
class Cut:
    """Values that are written before a cut and read after it, for the samples of the example.

    Attributes:
        hidden_bytes: what the layer before the cut has written.
        skip_bytes: all pending skips: what earlier layers have written.
        shared_bytes: values that many layers read, as a time embedding.
    """

    hidden_bytes: int
    skip_bytes: int
    shared_bytes: int


def count_cuts(
    layers: Sequence[ChainLayer],
    shared: AbstractSet[str],
    state: dict[str, Tensor],
    placement: str = "chain",
) -> list[Cut]:
    """Counts the bytes behind each layer but the last.

    Folded, a device holds a span from the front and its mirror from the back. The fold is where the
    most bytes of skips are pending; skips that begin before it and end after it have both ends on
    one device and count nowhere.

    Raises:
        ConfigError: the placement is unknown.
    """
    if placement not in ("chain", "folded"):
        raise ConfigError(
            f"placement: expected 'chain' or 'folded', got {placement!r}; do choose one of them"
        )
    sizes = measure_values(layers, state)
    writers = {key: index for index, layer in enumerate(layers) for key in layer.writes}
    readers = {k: i for i, layer in enumerate(layers) for k in layer.reads if k in writers}
    pending = [
        [key for key, last in readers.items() if writers[key] <= index < last]
        for index in range(len(layers) - 1)
    ]

    def skips(index: int) -> list[str]:
        return [k for k in pending[index] if writers[k] < index and k not in shared]

    def count(keys: list[str]) -> int:
        return sum(sizes[key] for key in keys)

    def is_local(key: str) -> bool:
        return placement == "folded" and writers[key] <= fold < readers[key]

    fold = max(range(len(pending)), key=lambda index: count(skips(index)), default=0)
    return [
        Cut(
            hidden_bytes=count([k for k in keys if writers[k] == index and k not in shared]),
            skip_bytes=count([k for k in skips(index) if not is_local(k)]),
            shared_bytes=count([k for k in keys if k in shared]),
        )
        for index, keys in enumerate(pending)
    ]


def measure_values(layers: Sequence[ChainLayer], state: dict[str, Tensor]) -> dict[str, int]:
    """Runs the layers without gradients and returns the bytes of each value and input."""
    values, sizes = dict(state), {}
    last_read = {key: index for index, layer in enumerate(layers) for key in layer.reads}
    with torch.no_grad():
        for index, layer in enumerate(layers):
            values.update(layer.call(values))
            sizes |= {key: tensor.nbytes for key, tensor in values.items()}
            for key in [k for k in values if last_read.get(k, -1) <= index]:
                del values[key]
    return sizes
