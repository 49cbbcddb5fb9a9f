"""Kinds of a model's layers: which are alike, and what one of each kind takes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from memo.planner.layer_plan import ATTENTION, INPUT, LayerPlan
from memo.planner.profile import ItemProfile, LayerProfile, PassBytes
from memo.profiler.calls import (
    LayerCall,
    is_index,
    refusing,
    run_on_fakes,
    signature_of,
    structure_of,
)
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
        whole: of its passes with all its items on the device; None where it cannot run again.
        reads_number: whether it reads its number, by which it may do something else than others of its structure.
    """

    number: int
    layer: nn.Module
    call: LayerCall
    plain: LayerBytes
    whole: LayerBytes | None
    reads_number: bool

    @classmethod
    def of(cls, number: int, layer: nn.Module, call: LayerCall) -> LayerKind:
        """The kind of a layer, whose bytes are counted.

        Raises:
            ConfigError: the layer fails.
        """
        weights = [name for name, one in layer.named_parameters() if one.ndim > 1]
        with _note_numbers(layer) as numbers:
            plain = _count(layer, call, LayerPlan())
        everything = _restore(INPUT, ATTENTION, *weights)
        try:
            whole = _count(layer, call, everything, is_real=plain.is_real)
        except NotRepeatable:
            whole = None
        return cls(number, layer, call, plain, whole, bool(numbers))

    @property
    def item_bytes(self) -> dict[str, int]:
        """Bytes of all its items; the input alone where it cannot run again, or saves nothing."""
        counted = {} if self.whole is None else self.whole.item_bytes
        return counted or {INPUT: self.call.source.nbytes}

    def levels(self, names: Sequence[str]) -> list[PassBytes]:
        """Bytes of its passes where the first of its items stays, the first two and so on.

        Args:
            names: of all items, the input first.
        """
        kept = [frozenset(names[: num + 1]) for num in range(len(names))]
        if self.whole is None:
            return [self._again(one).passes for one in kept]
        # Attention answers for all that it computes: what it takes when it runs again is counted apart.
        bases = {
            has_attention: self._again(frozenset([INPUT, ATTENTION][: 1 + has_attention]))
            for has_attention in {ATTENTION in one for one in kept}
        }
        levels = [bases[ATTENTION in one].passes_keeping(one) for one in kept]
        if levels[-1] == self.whole.passes:
            return levels
        # A product makes more than its result, as under autocast copies of its arguments.
        return [self._again(one).passes for one in kept]

    def _again(self, kept: frozenset[str]) -> LayerBytes:
        """Bytes of its passes where it runs again, with some items on the device."""
        return _count(self.layer, self.call, _restore(*kept), is_real=self.plain.is_real)

    def describe(self, times: LayerTimes) -> LayerProfile:
        """Its profile, without tiles; its items by the seconds that their bytes save.

        Args:
            times: measured.
        """
        items = [
            ItemProfile(
                name=name,
                num_bytes=num_bytes,
                recompute_s=0.0 if name == INPUT else times.call_s.get(name, 0.0),
            )
            for name, num_bytes in self.item_bytes.items()
        ]
        first, *others = items
        others.sort(key=lambda one: -one.recompute_s / max(one.num_bytes, 1))
        ordered = [first, *others]
        levels = [self.plain.passes] * len(ordered)
        if times.can_replay:
            levels = self.levels([one.name for one in ordered])
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
        )


def _restore(*names: str) -> LayerPlan:
    return LayerPlan(mode="restore", resident=frozenset(names))


def _count(
    layer: nn.Module, call: LayerCall, plan: LayerPlan, *, is_real: bool = False
) -> LayerBytes:
    """Bytes of a layer's passes under a plan."""
    with call.settings(), refusing(layer):
        return count_bytes(layer, call.args, call.kwargs, plan, is_real=is_real)


@contextmanager
def _note_numbers(layer: nn.Module) -> Iterator[set[str]]:
    """Notes attributes that number a layer, if its modules read them in the meantime."""
    numbers: set[str] = set()

    def noting(kind: type[nn.Module]) -> type[nn.Module]:
        def read(self: nn.Module, name: str) -> Any:
            if is_index(name):
                numbers.add(name)
            return kind.__getattribute__(self, name)

        return type(kind)(kind.__name__, (kind,), {"__getattribute__": read})

    modules = [one for one in layer.modules() if any(map(is_index, vars(one)))]
    kinds = [type(one) for one in modules]
    for module in modules:
        module.__class__ = noting(type(module))
    try:
        yield numbers
    finally:
        for module, kind in zip(modules, kinds, strict=True):
            module.__class__ = kind


def find_kinds(
    layers: Sequence[nn.Module], calls: Sequence[LayerCall | None]
) -> tuple[list[LayerKind], list[int]]:
    """Kinds of layers, and the kind of each layer by its number.

    Alike are layers of one structure that are called alike. Where they read their number, by which some choose what
    they do, bytes of each are counted too, if that takes no run of it.

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
            kinds.append(LayerKind.of(number, layer, call))
        numbers.append(place)
    for number, layer in enumerate(layers):
        if numbers[number] is None:
            numbers[number] = _kind_without_call(kinds, number, layer)
    return kinds, [one for one in numbers if one is not None]


def _is_same(kind: LayerKind, layer: nn.Module, call: LayerCall) -> bool:
    """Whether a layer of a kind's structure takes the kind's bytes."""
    if not kind.reads_number or call.own_structure == kind.call.own_structure:
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
