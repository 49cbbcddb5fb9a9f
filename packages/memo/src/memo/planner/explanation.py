"""A plan in words: what becomes of the layers, what hides, and where each byte goes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from memo.planner.layer_plan import ATTENTION, INPUT, LayerPlan, runs_of
from shared.units import format_bytes, format_s

__all__ = ["describe_disturbance", "describe_layer", "describe_layers", "explain"]


_BUSY_SHARE = 0.1
"""Share of the measuring for which threads waited for a processor, from which seconds are doubted."""


def explain(
    layers: tuple[LayerPlan, ...],
    store: str,
    prediction: Mapping[str, Any],
    *,
    has_block_loss: bool,
) -> str:
    """Says what a plan does and what it was predicted to take.

    Args:
        layers: a plan a layer.
        store: its name.
        prediction: see `Plan`; may be empty.
        has_block_loss: see `Plan`.
    """
    lines = describe_layers(layers)
    if has_block_loss:
        lines.append("loss      in blocks, without all logits in memory")
    if has_block_loss or any(layer.mode == "tiles" for layer in layers):
        lines.append(
            "rounding  sums over blocks and tiles round otherwise: not plain training's bits"
        )
    known: dict[str, Any] = dict(prediction)
    if not known:
        return "\n".join([*lines, "nothing was predicted: a fixed plan"])
    step_s, kept_s, again_s = (known[name] for name in ("step_s", "kept_s", "recomputed_s"))
    lines += [
        f"step      {format_s(step_s)}; {format_s(kept_s)} if everything were kept, "
        + f"{format_s(again_s)} if everything were computed again",
        f"again     {format_s(known['replayed_s'])} a step are computed again",
        f"copies    {format_s(known['exposed_s'])} a step wait for the store ({store}), the rest hides",
        f"device    {format_bytes(known['peak_bytes'])} at most, in the {known['peak_at']}{_expected(known)}:",
    ]
    lines += [
        f"            {format_bytes(num_bytes):>10}  {name}"
        for name, num_bytes in known["parts_bytes"].items()
        if num_bytes
    ]
    lines.append(f"store     {format_bytes(known['store_bytes'])} at most")
    if step_s > again_s:
        lines.append("slower    than computing everything again, which does not fit")
    return "\n".join([*lines, *describe_disturbance(known)])


def describe_disturbance(prediction: Mapping[str, Any]) -> list[str]:
    """A line that says how busy the machine was while seconds were measured; none where it was not."""
    share = float(prediction.get("details", {}).get("busy", 0.0))
    if share < _BUSY_SHARE:
        return []
    text = f"for {share:.0%} of the time a thread waited for a processor; plan on an idle machine"
    return [f"busy      other programs ran while seconds were measured: {text}"]


def _expected(known: Mapping[str, Any]) -> str:
    """What of the device is expected, where copies are quicker than they may be at worst."""
    expected = known.get("expected_peak_bytes", known["peak_bytes"])
    return "" if expected == known["peak_bytes"] else f", {format_bytes(expected)} expected"


def describe_layers(layers: tuple[LayerPlan, ...]) -> list[str]:
    """A line for each run of layers with one plan."""
    lines, first = [], 0
    for layer, count in runs_of(layers):
        last = first + count - 1
        name = f"layer {first}" if first == last else f"layers {first}-{last}"
        line = f"{name:<14}{describe_layer(layer)}"
        if layer.mode in ("restore", "tiles"):
            line += "; compute the rest again"
        if layer.mode == "tiles":
            line += f", {layer.tile_rows:,} rows at a time"
        lines.append(line)
        first = last + 1
    return lines


def describe_layer(layer: LayerPlan) -> str:
    """What of a layer is kept on the device and what is stored; an input that has no place is kept."""
    if layer.mode in ("keep", "whole"):
        return f"{'keep' if layer.mode == 'keep' else 'store'} all that autograd saves"
    kept = layer.resident if layer.stored.get(INPUT) else {*layer.resident, INPUT}
    stored = _items(layer.stored)
    if layer.default_fraction:
        stored.append(f"products {layer.default_fraction:.0%}")
    parts = {"keep": _items(dict.fromkeys(kept, 1.0)), "store": stored}
    return "; ".join(f"{verb} {', '.join(names)}" for verb, names in parts.items() if names)


def _items(shares: Mapping[str, float]) -> list[str]:
    """The input first and attention next, then products by their weights."""
    found = []
    for name in sorted(shares, key=lambda one: (one != INPUT, one != ATTENTION, one)):
        short = name.removesuffix(".weight").rsplit(".", 1)[-1]
        if shares[name]:
            found.append(short if shares[name] == 1 else f"{short} {shares[name]:.0%}")
    return found
