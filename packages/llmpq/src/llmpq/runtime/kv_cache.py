"""Keys and values in memory that is allocated once for a micro-batch, in transformers' own interface."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

__all__ = ["LayerCache", "allocate", "take_rows"]


class LayerCache(CacheLayerMixin):
    """Keys and values of one layer, written in place behind those that are there."""

    is_sliding = False

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        """Takes the memory [rows, heads, capacity, head dim]; it holds nothing yet."""
        super().__init__()
        self.keys, self.values = keys, values
        self.length = 0
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Does nothing, as the memory is there."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Writes new keys and values [rows, heads, tokens, head dim]; returns views of all so far."""
        begin, self.length = self.length, self.length + key_states.shape[2]
        assert self.keys is not None
        assert self.values is not None
        self.keys[:, :, begin : self.length] = key_states
        self.values[:, :, begin : self.length] = value_states
        return self.keys[:, :, : self.length], self.values[:, :, : self.length]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of what a query of some tokens sees."""
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        """Tokens that it holds."""
        return self.length

    def get_max_length(self) -> int:
        """Tokens that it can hold."""
        assert self.keys is not None
        return self.keys.shape[2]


def allocate(
    num_layers: int, shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device
) -> Cache:
    """An empty cache.

    Args:
        num_layers: layers of the stage.
        shape: rows, key heads, capacity in tokens, and head dim.
        dtype: of keys and values.
        device: where they lie.
    """

    def fresh() -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    layers: list[Any] = [LayerCache(fresh(), fresh()) for _ in range(num_layers)]
    return Cache(layers=layers)


def take_rows(cache: Cache, low: int, high: int) -> Cache:
    """The memory of some rows as a cache of its own, which holds nothing yet."""
    layers: list[Any] = []
    for layer in cache.layers:
        assert isinstance(layer, LayerCache)
        assert layer.keys is not None
        assert layer.values is not None
        layers.append(LayerCache(layer.keys[low:high], layer.values[low:high]))
    return Cache(layers=layers)
