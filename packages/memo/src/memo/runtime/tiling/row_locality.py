"""Whether a layer's parts before and after attention are row-local: found out by comparison."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from memo.runtime.recording.layer_state import LayerState
from memo.runtime.tiling.arguments import TileArguments
from memo.runtime.tiling.split_layer import SplitLayer, refuse
from shared.errors import ConfigError

__all__ = ["Proofs"]

_PROBE_TOKENS = 48
"""Tokens that are compared: with a tile of a third of them, which begins at no beginning."""

_LARGEST_DIFFERENCE = {torch.float64: 1e-9, torch.float32: 1e-4}
"""Relative to the largest entry; half types 3e-2: a product of fewer rows may round otherwise."""


class Proofs:
    """What was found out about layers, once for those of one class with the same submodules."""

    def __init__(self) -> None:
        """Knows nothing yet."""
        self._unread: dict[tuple[object, ...], frozenset[int]] = {}

    def apply(self, parts: SplitLayer, arguments: TileArguments, source: Tensor) -> None:
        """Proves a layer row-local, and notes in its parts which products only attention reads.

        Args:
            parts: of the layer.
            arguments, source: of the forward that is about to run.

        Raises:
            ConfigError: it is not.
        """
        key = _kind(parts.layer)
        if key not in self._unread:
            state = LayerState(parts.layer, source)
            with torch.no_grad(), _untouched(parts.layer):
                self._unread[key] = state.run(lambda: _prove(parts, arguments, source, state))
        parts.unread = self._unread[key]

    def assume(self, layer: nn.Module, unread: frozenset[int]) -> None:
        """Takes a layer to be row-local, where there are no values to compare.

        Args:
            layer: of a known kind.
            unread: its products before attention that only attention reads, by number.
        """
        self._unread[_kind(layer)] = unread


def _kind(layer: nn.Module) -> tuple[object, ...]:
    return *((name, type(one)) for name, one in layer.named_modules()), layer.training


@torch.no_grad()
def _prove(
    parts: SplitLayer, arguments: TileArguments, source: Tensor, state: LayerState
) -> frozenset[int]:
    """Compares a slice with its rows of more; returns the products before attention that only it reads."""
    layer, num_tokens = parts.layer, min(source.shape[1], _PROBE_TOKENS)
    start = num_tokens // 3
    stop = max(2 * start, start + 1)
    rows = source[:, :num_tokens].detach()
    part = rows[:, start:stop]

    def run() -> tuple[list[Tensor], list[Tensor]]:
        all_rows, slice_of_them = arguments.tile(rows, 0), arguments.tile(part, start)
        wide, _ = parts.before(all_rows)
        narrow, _ = parts.before(slice_of_them)
        _check_shapes(layer, wide, num_tokens)
        answer = _answer(wide)
        out, _ = parts.after(all_rows, answer)
        less, _ = parts.after(slice_of_them, answer[:, start:stop])
        if out.shape[:2] != rows.shape[:2] or less.shape[:2] != part.shape[:2]:
            raise refuse(layer, f"returns {list(out.shape)} for rows {list(rows.shape[:2])}")
        return (
            [*(one[:, :, start:stop] for one in wide), out[:, start:stop]],
            [*narrow, less],
        )

    try:
        pairs = run()
    except ConfigError:
        raise
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        raise refuse(layer, f"fails on some of its rows ({error})") from error
    if state.drawn:
        raise refuse(layer, "draws random numbers (dropout), which tiles would draw otherwise")
    if state.changed:
        raise refuse(layer, f"changes {state.changed[0]} while it runs, of which tiles see a part")
    for whole, piece in zip(*pairs, strict=True):
        if not _is_close(whole, piece):
            raise refuse(
                layer, "computes other values for a slice of its rows than for all of them"
            )
    return _find_unread(parts, arguments, part, start)


def _find_unread(
    parts: SplitLayer, arguments: TileArguments, part: Tensor, start: int
) -> frozenset[int]:
    """Products before attention that can be anything, NaN too, where attention is answered."""
    tile = arguments.tile(part, start)
    (query, key, value), _ = parts.before(tile)
    answer = _answer((query, key, value))
    wanted, _ = parts.after(tile, answer)
    unread = set()
    for number in range(parts.num_products(tile)):
        parts.unread = frozenset([number])
        out, _ = parts.after(tile, answer, filler=torch.nan)
        if torch.equal(out, wanted):
            unread.add(number)
    parts.unread = frozenset()
    return frozenset(unread)


def _answer(tensors: tuple[Tensor, ...]) -> Tensor:
    """Something of the form of attention's result: queries, as wide as values."""
    query, _, value = tensors
    width = value.shape[-1]
    form = query.transpose(1, 2)
    return (form.repeat(1, 1, 1, -(-width // form.shape[-1])))[..., :width].contiguous()


def _check_shapes(layer: nn.Module, tensors: tuple[Tensor, ...], num_tokens: int) -> None:
    for one in tensors:
        if one.ndim != 4 or one.shape[2] != num_tokens:
            raise refuse(layer, f"gives attention {list(one.shape)} for {num_tokens} tokens")


def _is_close(whole: Tensor, piece: Tensor) -> bool:
    if whole.shape != piece.shape:
        return False
    largest = whole.abs().max().item()
    allowed = _LARGEST_DIFFERENCE.get(whole.dtype, 3e-2) * largest
    return (whole - piece).abs().max().item() <= allowed


@contextmanager
def _untouched(layer: nn.Module) -> Iterator[None]:
    """Leaves a layer's buffers as they are, and random numbers."""
    kept = [(one, one.clone()) for one in layer.buffers()]
    sample = next(layer.parameters(), None)
    devices = [sample.device] if sample is not None and sample.is_cuda else []
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        for one, value in kept:
            one.copy_(value)
