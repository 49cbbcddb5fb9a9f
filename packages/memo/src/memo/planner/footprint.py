"""How many bytes a plan holds on the device and in the store, layer by layer, and where its peak is."""

from __future__ import annotations

from dataclasses import dataclass

from memo.planner.layer_plan import LayerPlan, rows_of
from memo.planner.plan import Plan
from memo.planner.profile import LayerProfile, StepProfile

__all__ = ["Footprint", "LayerFootprint", "footprint"]

_PAGE = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerFootprint:
    """One layer under its plan.

    Attributes:
        resident_bytes: that stay on the device from its forward to its backward.
        stored_bytes: that go to the store.
        buffer_bytes: that its stored items take when they are back.
        forward_bytes, backward_bytes: see `PassBytes`.
        replay_s: seconds of what is computed again.
    """

    resident_bytes: int
    stored_bytes: int
    buffer_bytes: int
    forward_bytes: int
    backward_bytes: int
    replay_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """A step under a plan.

    Attributes:
        layers: one by one.
        peak_bytes: most bytes on the device.
        peak_at: where that is: "forward", "head" or "backward", and of which layer.
        store_bytes: most bytes in the store.
        parts: bytes at the peak, by what they are.
    """

    layers: tuple[LayerFootprint, ...]
    peak_bytes: int
    peak_at: str
    store_bytes: int
    parts: dict[str, int]


def footprint(plan: Plan, profile: StepProfile) -> Footprint:
    """Bytes of a step, with as many copies on their way as the plan allows.

    Args:
        plan: of the profile's number of layers.
        profile: what each layer makes.
    """
    rows = profile.num_tokens
    unlike = {id(layer): layer for layer in plan.layers}
    known = {key: _layer(one, profile.layer, rows, plan.cut) for key, one in unlike.items()}
    layers = [known[id(layer)] for layer in plan.layers]
    input_bytes = profile.layer.items[0].num_bytes
    stored = [layer.buffer_bytes for layer in layers if layer.buffer_bytes]
    buffers = sum(sorted(stored)[-plan.num_buffers :])
    best: tuple[int, str, dict[str, int]] = (-1, "", {})

    def look(where: str, parts: dict[str, int]) -> None:
        nonlocal best
        total = sum(parts.values())
        if total > best[0]:
            best = total, where, parts

    held, sending = 0, []
    fixed = {"parameters, gradients, optimizer": profile.fixed_bytes, "buffers": buffers}
    for number, layer in enumerate(layers):
        look(
            f"forward of layer {number}",
            {
                **fixed,
                "held by layers": held,
                "on their way out": sum(sending),
                "working": input_bytes + layer.forward_bytes,
            },
        )
        held += layer.resident_bytes
        if layer.stored_bytes:
            sending = [*sending, layer.stored_bytes][-plan.max_sending :]
    head = profile.block_head_bytes if plan.has_block_loss else profile.head_bytes
    look(
        "loss",
        {
            **fixed,
            "held by layers": held,
            "on their way out": sum(sending),
            "working": input_bytes + (head or 0),
        },
    )
    for number, layer in reversed(list(enumerate(layers))):
        look(
            f"backward of layer {number}",
            {**fixed, "held by layers": held, "working": layer.backward_bytes},
        )
        held -= layer.resident_bytes
    return Footprint(
        layers=tuple(layers),
        peak_bytes=best[0],
        peak_at=best[1],
        store_bytes=sum(layer.stored_bytes for layer in layers),
        parts=best[2],
    )


def _layer(plan: LayerPlan, profile: LayerProfile, rows: int, cut: int) -> LayerFootprint:
    if plan.mode == "keep":
        return LayerFootprint(
            resident_bytes=profile.saved_bytes,
            stored_bytes=0,
            buffer_bytes=0,
            forward_bytes=profile.kept.forward,
            backward_bytes=profile.kept.backward,
            replay_s=0.0,
        )
    if plan.mode == "whole":
        return LayerFootprint(
            resident_bytes=0,
            stored_bytes=_pages(profile.saved_bytes),
            buffer_bytes=_pages(profile.saved_bytes),
            forward_bytes=profile.kept.forward,
            backward_bytes=profile.kept.backward,
            replay_s=0.0,
        )
    resident = stored = buffer = available = 0
    replay_s = profile.replay_s
    for item in profile.items:
        kept = rows_of(rows, plan.fraction(item.name), cut) if item.name not in plan.resident else 0
        whole = item.name in ("input", "attention")
        share = plan.fraction(item.name) if whole else kept / max(rows, 1)
        if item.name in plan.resident:
            resident, share = resident + item.num_bytes, 1.0
        elif share > 0:
            stored += _pages(int(item.num_bytes * share))
            buffer += _pages(item.num_bytes)
        elif item.name == "input":  # nothing gives it back: without a place it stays
            resident, share = resident + item.num_bytes, 1.0
        available += share > 0
        replay_s += (1.0 - share) * item.recompute_s
    level = profile.levels[max(available, 1) - 1]
    return LayerFootprint(
        resident_bytes=resident,
        stored_bytes=stored,
        buffer_bytes=buffer,
        forward_bytes=level.forward,
        backward_bytes=level.backward,
        replay_s=replay_s,
    )


def _pages(num_bytes: int) -> int:
    return -(-num_bytes // _PAGE) * _PAGE
