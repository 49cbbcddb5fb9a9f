"""A layer's passes by tiles: seconds measured, bytes counted on fake tensors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from memo.planner.layer_plan import ATTENTION, INPUT, LayerPlan
from memo.planner.profile import TilesProfile
from memo.profiler.clock import now, untouched_gradients
from memo.profiler.layer_bytes import count_bytes, first_tensor
from memo.profiler.timing.layer_times import LayerTimes, longer_s
from memo.runtime.layers import without_cache
from memo.runtime.recording.arguments import input_of
from memo.runtime.tiling.record import TiledRecord
from memo.runtime.tiling.row_locality import Proofs
from shared.errors import ConfigError

__all__ = ["TILE_ROWS", "count_tiles", "measure_tiles", "tile_plan", "tile_rows_of"]

TILE_ROWS = {"cpu": 512, "cuda": 8192}
"""Of a tile: few beside a long sequence, enough for products at full rate."""

_LEAST_ROWS = 64
_MOST_TILES = {"cpu": 64, "cuda": 128}
"""Of a batch: longer ones have longer tiles, as counting takes time for each."""

_REPEATS = 4
"""The first is left out; of three, the quickest counts, as what else runs only adds to it."""

_Call = tuple[tuple[Any, ...], dict[str, Any]]


def count_tiles(layer: nn.Module, whole: _Call, proofs: Proofs) -> TilesProfile | None:
    """Counts a layer's bytes by tiles; its seconds are 0 until they are measured.

    Args:
        layer: as it is in the model; it runs on a few of its rows, to prove them independent.
        whole: what it is called with, at the batch's own length.
        proofs: take down what is proven.

    Returns:
        None where the layer cannot go by tiles.
    """
    args, kwargs = whole[0], without_cache(whole[1])
    source = input_of(args, kwargs)
    tile_rows = tile_rows_of(source.numel() // source.shape[-1], source.device.type)
    plans = [tile_plan(tile_rows, num) for num in (1, 2)]
    try:
        _record(layer, args, kwargs, plans[0], proofs)
        low, high = (count_bytes(layer, *whole, plan, proofs).passes for plan in plans)
    except ConfigError:
        return None
    return TilesProfile(tile_rows=tile_rows, forward_s=0.0, backward_s=0.0, levels=(low, high))


def measure_tiles(
    layer: nn.Module,
    called: _Call,
    counted: TilesProfile,
    times: LayerTimes,
    factor: int,
    proofs: Proofs,
) -> TilesProfile | None:
    """Measures a layer by tiles; parameters and their gradients are left as they were.

    Args:
        layer: as it is in the model.
        called: what it is called with where seconds are measured.
        counted: from `count_tiles`, at the batch's own length.
        times: of its passes without tiles, where seconds are measured.
        factor: how many times longer the batch is.
        proofs: of `count_tiles`.

    Returns:
        None where the layer cannot go by tiles.
    """
    args, kwargs = called[0], without_cache(called[1])
    source = input_of(args, kwargs)
    try:
        forward_s, backward_s = _seconds(
            layer, args, kwargs, source, tile_plan(counted.tile_rows, 2), proofs
        )
    except ConfigError:
        return None
    return replace(
        counted,
        forward_s=longer_s(forward_s, times.call_s.get(ATTENTION, 0.0), factor),
        backward_s=longer_s(backward_s, times.attention_backward_s, factor),
    )


def tile_rows_of(num_rows: int, device_type: str) -> int:
    """Rows of a tile of a batch of so many, on a device "cpu" or "cuda"."""
    least_rows = num_rows // _MOST_TILES[device_type]
    return max(_LEAST_ROWS, min(TILE_ROWS[device_type], num_rows // 4), least_rows)


def tile_plan(tile_rows: int, num_items: int) -> LayerPlan:
    """A layer by tiles that keeps its input, and with two items attention's result too."""
    kept = [INPUT, ATTENTION][:num_items]
    return LayerPlan(mode="tiles", tile_rows=tile_rows, resident=frozenset(kept))


def _record(
    layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], plan: LayerPlan, proofs: Proofs
) -> TiledRecord:
    """One forward by tiles, not run yet; the layer is proven row-local.

    Raises:
        ConfigError: it is not.
    """
    return TiledRecord(
        layer, layer.forward, args, kwargs, plan=plan, proofs=proofs, fetch=lambda _: None
    )


def _seconds(
    layer: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    source: Tensor,
    plan: LayerPlan,
    proofs: Proofs,
) -> tuple[float, float]:
    """Seconds of a forward and a backward."""
    forward, backward = [], []
    with untouched_gradients(layer, source), torch.enable_grad():
        for _ in range(_REPEATS):
            record = _record(layer, args, kwargs, plan, proofs)
            started = now(source.device)
            out = first_tensor(record.run())
            forward.append(now(source.device) - started)
            started = now(source.device)
            out.backward(torch.ones_like(out))
            backward.append(now(source.device) - started)
            del record, out
    return min(forward[1:]), min(backward[1:])
