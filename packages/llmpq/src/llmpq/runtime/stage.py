"""A stage's work: its layers on the micro-batches that pass through, each with a cache of its own."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from llmpq.config import ModelSpec
from llmpq.planner.plan import Plan
from llmpq.runtime.layers import StageModel
from llmpq.runtime.linear import synchronise

__all__ = ["Batch", "LayerCache", "StageSeconds", "StageWorker", "allocate"]


@dataclass(frozen=True, slots=True)
class Batch:
    """Prompts of one call, padded on the left, and how they are cut.

    Attributes:
        mask: 1 for tokens that count [prompts, prompt tokens].
        max_new_tokens: most tokens generated.
        prefill_size: prompts in a prefill micro-batch.
        decode_size: prompts in a decode micro-batch.
    """

    mask: Tensor
    max_new_tokens: int
    prefill_size: int
    decode_size: int

    @property
    def num_decode(self) -> int:
        """Number of decode micro-batches."""
        return -(-len(self.mask) // self.decode_size)

    def rows(self, number: int) -> tuple[int, int]:
        """First prompt of a decode micro-batch, and the one after its last."""
        low = number * self.decode_size
        return low, min(low + self.decode_size, len(self.mask))

    def chunks(self, number: int) -> list[tuple[int, int]]:
        """The prefill micro-batches of a decode micro-batch, as rows of that one."""
        low, high = self.rows(number)
        size = self.prefill_size
        return [(at, min(at + size, high - low)) for at in range(0, high - low, size)]


@dataclass(frozen=True, kw_only=True, slots=True)
class StageSeconds:
    """Measured seconds of one rank's work in one call, one entry a micro-batch, in order.

    Waiting for messages is not in them.

    Attributes:
        prefill: of the layers; on the first stage with the embedding.
        decode: likewise, of one token of a decode micro-batch.
        head_prefill: of final norm, head and choosing tokens behind each prefill micro-batch;
            empty but on the first stage.
        head_decode: likewise behind each step of decoding.
    """

    prefill: tuple[float, ...] = ()
    decode: tuple[float, ...] = ()
    head_prefill: tuple[float, ...] = ()
    head_decode: tuple[float, ...] = ()

    @property
    def total_s(self) -> float:
        """Seconds of all work."""
        return sum(sum(getattr(self, part.name)) for part in fields(self))


class StageWorker:
    """Runs a stage's layers for one call after another."""

    def __init__(
        self, model: StageModel, plan: Plan, spec: ModelSpec, device: torch.device
    ) -> None:
        """Takes a loaded stage, which it moves to the device."""
        self.model, self._plan, self._shape, self.device = model, plan, spec, device
        model.to_device(device)
        self._batch: Batch | None = None
        self._caches: dict[int, Cache] = {}
        self._masks: dict[int, Tensor] = {}
        self._spent: dict[str, list[float]] = {}

    @property
    def seconds(self) -> StageSeconds:
        """What the last call took."""
        return StageSeconds(**{name: tuple(spent) for name, spent in self._spent.items()})

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Adds the seconds of its block to a field of `seconds`."""
        begin = time.perf_counter()
        yield
        synchronise(self.device)
        self._spent.setdefault(part, []).append(time.perf_counter() - begin)

    def begin(self, batch: Batch) -> None:
        """Allocates keys and values of all prompts of a call."""
        self._batch = batch
        self._spent.clear()
        capacity = batch.mask.shape[1] + batch.max_new_tokens
        dtype = getattr(torch, self._plan.dtype)
        for number in range(batch.num_decode):
            low, high = batch.rows(number)
            shape = high - low, self._shape.num_kv_heads, capacity, self._shape.head_dim
            self._caches[number] = allocate(len(self.model.layers), shape, dtype, self.device)
            mask = torch.ones(high - low, capacity, dtype=torch.int64)
            mask[:, : batch.mask.shape[1]] = batch.mask[low:high]
            self._masks[number] = mask.to(self.device)

    def end(self) -> None:
        """Frees keys and values."""
        self._caches.clear()
        self._masks.clear()
        self._batch = None

    @torch.no_grad()
    def prefill(self, number: int, low: int, high: int, x: Tensor) -> Tensor:
        """Runs rows low to high - 1 of a decode micro-batch on their prompts.

        Args:
            number: of the decode micro-batch.
            low, high: its rows.
            x: token ids, or hidden states, [rows, prompt tokens, ...].
        """
        assert self._batch is not None, "a call has begun"
        tokens = self._batch.mask.shape[1]
        mask = self._masks[number][low:high, :tokens]
        cache = _take_rows(self._caches[number], low, high)
        with self.timed("prefill"):
            hidden = self.model(x.to(self.device), mask, _positions(mask), cache)
        for layer in self._caches[number].layers:
            assert isinstance(layer, LayerCache)
            layer.length = tokens
        return hidden

    @torch.no_grad()
    def decode(self, number: int, x: Tensor) -> Tensor:
        """Runs all rows of a decode micro-batch on one new token each [rows, 1, ...]."""
        length = self._caches[number].get_seq_length() + 1
        mask = self._masks[number][:, :length]
        with self.timed("decode"):
            x = x.to(self.device)
            return self.model(x, mask, _positions(mask)[:, -1:], self._caches[number])


def _positions(mask: Tensor) -> Tensor:
    """Positions of tokens: those that do not count have the first one's."""
    return (mask.cumsum(-1) - 1).clamp_(min=0)


class LayerCache(CacheLayerMixin):
    """Keys and values of one layer in transformers' own interface, in memory allocated once."""

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


def _take_rows(cache: Cache, low: int, high: int) -> Cache:
    """The memory of some rows as a cache of its own, which holds nothing yet."""
    layers: list[Any] = []
    for layer in cache.layers:
        assert isinstance(layer, LayerCache)
        assert layer.keys is not None
        assert layer.values is not None
        layers.append(LayerCache(layer.keys[low:high], layer.values[low:high]))
    return Cache(layers=layers)
