"""A Llama's layer in round numbers, which planners are tested on."""

from dataclasses import replace

from memo.planner.profile import (
    ItemProfile,
    LayerProfile,
    PassBytes,
    StepProfile,
    TilesProfile,
)
from shared.topology.link import Link

UNIT = 1 << 20
ITEMS = (
    ("input", 1, 0.0),
    ("attention", 1, 0.2),
    ("gate", 3, 0.09),
    ("up", 3, 0.08),
    ("query", 1, 0.01),
)


TILES = TilesProfile(
    tile_rows=100,
    forward_s=0.6,
    backward_s=1.4,
    levels=(PassBytes(forward=3 * UNIT, backward=8 * UNIT),) * 2,
)


def layer_profile(*, items=ITEMS, tiles=None, **changes):
    layer = LayerProfile(
        num_tokens=1600,
        input_bytes=UNIT,
        items=tuple(ItemProfile(name=n, num_bytes=b * UNIT, recompute_s=s) for n, b, s in items),
        saved_bytes=20 * UNIT,
        forward_s=0.5,
        backward_s=1.0,
        replay_s=0.05,
        kept=PassBytes(forward=21 * UNIT, backward=6 * UNIT),
        levels=tuple(
            PassBytes(forward=(6 + 2 * k) * UNIT, backward=(26 - k) * UNIT)
            for k in range(len(items))
        ),
        tiles=tiles,
    )
    return replace(layer, **changes)


def step_profile(
    *, num_layers=6, rate=None, slowdown=1.0, items=ITEMS, tiles=None, layer=None, **changes
):
    """A step whose copies run at a rate in bytes/s; None: without a store."""
    layer = layer or layer_profile(items=items, tiles=tiles)
    link = None if rate is None else Link.from_rate(rate)
    known = {
        "layers": (layer,) * num_layers, "num_tokens": 1600, "forward_bytes": UNIT, "head_s": 0.1, "head_bytes": 10 * UNIT,
        "fixed_bytes": 100 * UNIT, "send": link, "fetch": link, "slowdown": slowdown,
    }  # fmt: skip
    return StepProfile(**{**known, **changes})
