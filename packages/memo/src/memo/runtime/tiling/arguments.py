"""Arguments of a layer's forward, whole and cut to a tile of tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from memo.runtime.recording.arguments import tensors_in

__all__ = ["Tile", "TileArguments"]


class Tile:
    """Arguments for some tokens.

    Attributes:
        args, kwargs: to call the layer's forward with.
    """

    def __init__(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], cuts: list[tuple[Tensor, Tensor]]
    ) -> None:
        """Takes arguments, and pairs of a cut tensor and the whole one, by which these are told apart."""
        self.args, self.kwargs = args, kwargs
        self._cuts = cuts

    def whole(self, value: Any) -> Any:
        """The uncut tensor where a value is one that this tile cut, and else the value."""
        return next((whole for cut, whole in self._cuts if cut is value), value)


class TileArguments:
    """Arguments of one forward, apart from the layer's input.

    A tensor is cut where it has the input's number of tokens as its second dimension, and as its first one
    1 or the input's batch: cosines, sines and position ids for instance. Masks [batch, 1, tokens, tokens] are
    not: only attention reads them, which is given whole tensors.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any], source: Tensor) -> None:
        """Notes arguments, and drops the input from them.

        Args:
            args, kwargs: what the layer is called with.
            source: its input among these, [batch, tokens, ...].
        """
        self._batch, self._num_tokens = source.shape[:2]

        def empty(one: Any) -> Any:
            return _INPUT if one is source else one

        self._args = tuple(map(empty, args))
        self._kwargs = {key: empty(one) for key, one in kwargs.items()}

    def tensors(self) -> list[Tensor]:
        """All tensors, whole."""
        return list(tensors_in((self._args, self._kwargs)))

    def tile(self, rows: Tensor, start: int) -> Tile:
        """Arguments for the tokens of a tile.

        Args:
            rows: the input's, [batch, tile tokens, ...].
            start: number of the first one.
        """
        stop = start + rows.shape[1]
        cuts: list[tuple[Tensor, Tensor]] = []

        def cut(tensor: Tensor) -> Tensor:
            if tensor.ndim < 2 or tensor.shape[1] != self._num_tokens:
                return tensor
            if tensor.shape[0] not in (1, self._batch):
                return tensor
            cuts.append((tensor[:, start:stop], tensor))
            return cuts[-1][0]

        args, kwargs = _mapped((self._args, self._kwargs), rows, cut)
        return Tile(args, kwargs, cuts)


_INPUT: Any = object()
"""Stands for a layer's input among its arguments."""


def _mapped(values: Any, rows: Tensor, cut: Callable[[Tensor], Tensor]) -> Any:
    if values is _INPUT:
        return rows
    if isinstance(values, Tensor):
        return cut(values)
    if isinstance(values, tuple | list):
        return type(values)(_mapped(one, rows, cut) for one in values)
    if isinstance(values, dict):
        return {key: _mapped(one, rows, cut) for key, one in values.items()}
    return values
