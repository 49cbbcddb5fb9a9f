"""The two row-local parts of a layer, before and after its attention, by running its own forward."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from memo.runtime.attention import Answer, listening
from memo.runtime.recording.arguments import tensors_in
from memo.runtime.recording.calls import PRODUCTS, Products
from memo.runtime.tiling.arguments import Tile
from shared.errors import ConfigError

__all__ = ["AttentionCall", "SplitLayer", "refuse"]

AttentionCall = Callable[[Tensor, Tensor, Tensor], Answer]
"""A layer's attention on whole queries, keys and values."""


def refuse(layer: nn.Module, reason: str) -> ConfigError:
    """The error that says why a layer cannot go by tiles, and what can be done instead."""
    return ConfigError(
        f"{type(layer).__name__}: expected a layer whose parts before and after attention are row-local, "
        f"got one that {reason}; give it mode 'restore', 'whole' or 'keep' instead of 'tiles'"
    )


class _Reached(Exception):
    """Attention was called: what comes after it is not wanted."""


class SplitLayer:
    """A layer in two parts.

    Attributes:
        layer: the layer.
        unread: numbers of products before attention whose results only attention reads; they need not be
            computed where attention is answered.
    """

    def __init__(self, layer: nn.Module, forward: Callable[..., Any]) -> None:
        """Takes a layer and its own forward."""
        self.layer = layer
        self.unread: frozenset[int] = frozenset()
        self._forward = forward

    def before(self, tile: Tile) -> tuple[tuple[Tensor, Tensor, Tensor], AttentionCall]:
        """Runs the part before attention.

        Returns:
            Queries, keys and values of the tile, [batch, heads, tile tokens, head_dim], and the attention
            that the layer calls with them.

        Raises:
            ConfigError: the layer calls no attention, or gives it what is made within the layer.
        """
        listener = _Before(self.layer, tile)
        try:
            with listening(listener):
                self._forward(*tile.args, **tile.kwargs)
        except _Reached:
            assert listener.found is not None
            return listener.found
        raise refuse(
            self.layer,
            "calls no attention of transformers' AttentionInterface (attn_implementation is a name there)",
        )

    def after(self, tile: Tile, answer: Tensor, filler: float | None = None) -> tuple[Tensor, Any]:
        """Runs the part after attention.

        Args:
            tile: arguments.
            answer: attention's result for the tile, [batch, tile tokens, ...].
            filler: what results that nobody reads consist of; by default memory as it is.

        Returns:
            The layer's hidden states for the tile, and what the layer returns beside them: None for a bare
            tensor, else the rest of a tuple.

        Raises:
            ConfigError: attention is called more than once, or tensors are returned beside the states.
        """
        listener = _After(self.layer, answer, self.unread, filler)
        with listening(listener), Products(listener.product):
            out = self._forward(*tile.args, **tile.kwargs)
        if isinstance(out, Tensor):
            return out, None
        if not isinstance(out, tuple) or not out or not isinstance(out[0], Tensor):
            raise refuse(self.layer, f"returns a {type(out).__name__}")
        if any(True for _ in tensors_in(out[1:])):
            raise refuse(self.layer, "returns tensors beside its hidden states")
        return out[0], out[1:]

    def num_products(self, tile: Tile) -> int:
        """Counts matrix products before attention."""
        count = [0]

        def product(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            count[0] += 1
            return function(*args, **kwargs)

        with Products(product):
            self.before(tile)
        return count[0]


class _Before:
    """Takes what attention is called with, and stops the layer."""

    def __init__(self, layer: nn.Module, tile: Tile) -> None:
        self.found: tuple[tuple[Tensor, Tensor, Tensor], AttentionCall] | None = None
        self._layer, self._tile = layer, tile

    def attend(self, call: partial[Answer], query: Tensor, key: Tensor, value: Tensor) -> Answer:
        module, _, _, _, *args = call.args
        whole = self._tile.whole
        args = [whole(one) for one in args]
        settings = {name: whole(one) for name, one in call.keywords.items()}
        given = [*tensors_in((self._tile.args, self._tile.kwargs))]
        self._check((*args, *settings.values()), [whole(one) for one in given])
        function = call.func

        def attention(*whole_tensors: Tensor) -> Answer:
            return function(module, *whole_tensors, *args, **settings)

        self.found = (query, key, value), attention
        raise _Reached

    def _check(self, values: Iterable[Any], given: list[Tensor]) -> None:
        for one in tensors_in(tuple(values)):
            if one.requires_grad or not any(one is other for other in given):
                raise refuse(
                    self._layer, "gives attention a tensor that is no argument of the layer"
                )


class _After:
    """Answers attention, and products before it that nobody else reads."""

    def __init__(
        self, layer: nn.Module, answer: Tensor, unread: frozenset[int], filler: float | None
    ) -> None:
        self._layer, self._answer = layer, answer
        self._unread, self._filler = unread, filler
        self._num_products, self._is_answered = 0, False

    def attend(self, call: partial[Answer], query: Tensor, key: Tensor, value: Tensor) -> Answer:
        if self._is_answered:
            raise refuse(self._layer, "calls attention more than once")
        self._is_answered = True
        return self._answer, None

    def product(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        number, self._num_products = self._num_products, self._num_products + 1
        if number not in self._unread or kwargs:
            return function(*args, **kwargs)
        rows_at, weight_at = PRODUCTS[function]
        rows, weight = args[rows_at], args[weight_at]
        width = weight.shape[0 if function is functional.linear else 1]
        shape = (*rows.shape[:-1], width)
        if self._filler is None:
            return torch.empty(shape, dtype=rows.dtype, device=rows.device)
        return torch.full(shape, self._filler, dtype=rows.dtype, device=rows.device)
