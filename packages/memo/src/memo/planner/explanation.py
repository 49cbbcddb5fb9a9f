"""A plan in words: what becomes of the layers, what hides, and where each byte goes."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby
from typing import Any

from memo.planner.layer_plan import LayerPlan
from shared.units import format_bytes, format_s

__all__ = ["describe_layers", "explain"]


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
        f"device    {format_bytes(known['peak_bytes'])} at most, in the {known['peak_at']}:",
    ]
    lines += [
        f"            {format_bytes(num_bytes):>10}  {name}"
        for name, num_bytes in known["parts_bytes"].items()
        if num_bytes
    ]
    lines.append(f"store     {format_bytes(known['store_bytes'])} at most")
    return "\n".join(lines)


def describe_layers(layers: tuple[LayerPlan, ...]) -> list[str]:
    """A line for each run of layers with one plan."""
    lines, first = [], 0
    for _, group in groupby(layers):
        alike = list(group)
        last = first + len(alike) - 1
        name = f"layer {first}" if first == last else f"layers {first}-{last}"
        lines.append(f"{name:<14}{_describe(alike[0])}")
        first = last + 1
    return lines


def _describe(layer: LayerPlan) -> str:
    if layer.mode == "keep":
        return "keep all that autograd saves"
    if layer.mode == "whole":
        return "store all that autograd saves"
    parts = []
    if layer.resident:
        parts.append(f"keep {', '.join(map(_short, sorted(layer.resident)))}")
    stored = [
        _short(name) + ("" if fraction == 1 else f" {fraction:.0%}")
        for name, fraction in layer.stored.items()
        if fraction
    ]
    if layer.default_fraction:
        stored.append(f"products {layer.default_fraction:.0%}")
    if stored:
        parts.append(f"store {', '.join(stored)}")
    again = "compute the rest again"
    if layer.mode == "tiles":
        again += f", {layer.tile_rows:,} rows at a time"
    return "; ".join([*parts, again])


def _short(name: str) -> str:
    return name.removesuffix(".weight").rsplit(".", 1)[-1]
