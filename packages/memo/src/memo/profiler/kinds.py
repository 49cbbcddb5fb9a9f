"""Kinds of a model's layers: which are alike, and what one of each kind takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from memo.planner.layer_plan import ATTENTION, INPUT, LayerPlan
from memo.planner.profile import ItemProfile, LayerProfile, TilesProfile
from memo.profiler.calls import LayerCall, refusing, run_on_fakes, signature_of, structure_of
from memo.profiler.layer_bytes import LayerBytes, LayerPasses, count_bytes
from memo.profiler.timing.layer_times import LayerTimes
from memo.runtime.recording.calls import NotRepeatable
from shared.errors import ConfigError

__all__ = ["LayerKind", "find_kinds"]


@dataclass(frozen=True, slots=True)
class LayerKind:
    """Layers that are alike, by the first of them.

    Attributes:
        number: of that layer.
        layer: itself.
        call: what the model calls it with.
        plain: bytes of its passes without a plan.
    """

    number: int
    layer: nn.Module
    call: LayerCall
    plain: LayerBytes

    def count(self, plan: LayerPlan) -> LayerBytes:
        """Bytes of its passes under a plan."""
        with self.call.settings(), refusing(self.layer):
            return count_bytes(self.layer, self.call.args, self.call.kwargs, plan)

    def item_bytes(self) -> dict[str, int]:
        """Bytes of all its items; the input alone where it cannot run again, or saves nothing."""
        weights = [name for name, one in self.layer.named_parameters() if one.ndim > 1]
        everything = frozenset([INPUT, ATTENTION, *weights])
        try:
            counted = self.count(LayerPlan(mode="restore", resident=everything)).item_bytes
        except NotRepeatable:
            counted = {}
        return counted or {INPUT: self.call.source.nbytes}

    def describe(
        self, item_bytes: dict[str, int], times: LayerTimes, tiles: TilesProfile | None
    ) -> LayerProfile:
        """Its profile.

        Args:
            item_bytes: of its items.
            times: measured.
            tiles: of its passes by tiles.
        """
        items = [
            ItemProfile(
                name=name,
                num_bytes=num_bytes,
                recompute_s=0.0 if name == INPUT else times.call_s.get(name, 0.0),
            )
            for name, num_bytes in item_bytes.items()
        ]
        first, *others = items
        others.sort(key=lambda one: -one.recompute_s / max(one.num_bytes, 1))
        ordered = [first, *others]
        levels = [self.plain.passes] * len(ordered)
        if times.can_replay:
            kept = [
                frozenset(one.name for one in ordered[: num + 1]) for num in range(len(ordered))
            ]
            levels = [
                self.count(LayerPlan(mode="restore", resident=names)).passes for names in kept
            ]
        return LayerProfile(
            num_tokens=self.call.num_rows,
            input_bytes=self.call.source.nbytes,
            items=tuple(ordered),
            saved_bytes=self.plain.held_bytes,
            forward_s=times.forward_s,
            backward_s=times.backward_s,
            replay_s=times.replay_s,
            kept=self.plain.passes,
            levels=tuple(levels),
            can_replay=times.can_replay,
            tiles=tiles,
        )


def find_kinds(
    layers: Sequence[nn.Module], calls: Sequence[LayerCall | None]
) -> tuple[list[LayerKind], list[int]]:
    """Kinds of layers, and the kind of each layer by its number.

    Alike are layers of one structure that are called alike. As some choose by their number what they do, bytes of
    each are counted too, where that takes no run of it.

    Args:
        layers: of a model, inside of `untouched`.
        calls: of each; None where it is not called.

    Raises:
        ConfigError: a layer fails, or one is not called that is like none that is.
    """
    kinds: list[LayerKind] = []
    numbers: list[int | None] = []
    for number, (layer, call) in enumerate(zip(layers, calls, strict=True)):
        if call is None:
            numbers.append(None)
            continue
        alike = [
            place
            for place, kind in enumerate(kinds)
            if call.structure == kind.call.structure
            and signature_of(call.args, call.kwargs)
            == signature_of(kind.call.args, kind.call.kwargs)
        ]
        place = next((one for one in alike if _is_same(kinds[one], layer, call)), None)
        if place is None:
            place = len(kinds)
            with call.settings(), refusing(layer):
                plain = count_bytes(layer, call.args, call.kwargs, LayerPlan())
            kinds.append(LayerKind(number, layer, call, plain))
        numbers.append(place)
    for number, layer in enumerate(layers):
        if numbers[number] is None:
            numbers[number] = _kind_without_call(kinds, number, layer)
    return kinds, [one for one in numbers if one is not None]


def _is_same(kind: LayerKind, layer: nn.Module, call: LayerCall) -> bool:
    """Whether a layer of a kind's structure takes the kind's bytes."""
    if call.own_structure == kind.call.own_structure:
        return True
    passes = LayerPasses(layer, LayerPlan(), None)
    try:
        with call.settings(), torch.enable_grad():
            return run_on_fakes(passes, *call.args, **call.kwargs) == kind.plain
    except RuntimeError:  # shapes follow from values
        return True


def _kind_without_call(kinds: list[LayerKind], number: int, layer: nn.Module) -> int:
    for place, kind in enumerate(kinds):
        if structure_of(layer) == kind.call.structure:
            return place
    raise ConfigError(
        f"layer {number} ({type(layer).__name__}): expected a layer that the model calls on this batch, or one like "
        "those that it calls, got one of another kind, which cannot be measured; give a batch that reaches it, or "
        "name the others by memo.autotune(..., layers=[...])"
    )
