"""How many bytes a plan holds on the device and in the store, layer by layer, and where its peak is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

from memo.planner.layer_plan import ATTENTION, INPUT, LayerPlan, rows_of
from memo.planner.plan import Plan
from memo.planner.profile import LayerProfile, PassBytes, StepProfile
from shared.errors import ConfigError

__all__ = ["Footprint", "LayerFootprint", "add_up", "footprint", "layer_footprint", "pass_bytes"]

_PAGE = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerFootprint:
    """One layer under its plan.

    Attributes:
        resident_bytes: that stay on the device from its forward to its backward.
        stored_bytes: that go to the store.
        buffer_bytes: that its stored items take when they are back; also until they are sent, as of an item
            whose first rows are stored all rows are there.
        input_bytes: of its input.
        forward_bytes, backward_bytes: see `PassBytes`.
        forward_s: seconds of its forward.
        backward_s: of a plain backward.
        replay_s: seconds of its backward beyond a plain one: what is computed again.
    """

    resident_bytes: int
    stored_bytes: int
    buffer_bytes: int
    input_bytes: int
    forward_bytes: int
    backward_bytes: int
    forward_s: float
    backward_s: float
    replay_s: float

    @property
    def passes_s(self) -> float:
        """Seconds of its forward and its backward."""
        return self.forward_s + self.backward_s + self.replay_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """A step under a plan.

    Attributes:
        runs: layers that are alike and follow one another, and how many.
        peak_bytes: most bytes on the device.
        peak_at: where that is: "forward", "head" or "backward", and of which layer.
        store_bytes: most bytes in the store.
        parts: bytes at the peak, by what they are.
    """

    runs: tuple[tuple[LayerFootprint, int], ...]
    peak_bytes: int
    peak_at: str
    store_bytes: int
    parts: dict[str, int]

    @property
    def layers(self) -> tuple[LayerFootprint, ...]:
        """Layers one by one."""
        return tuple(layer for layer, count in self.runs for _ in range(count))


def footprint(plan: Plan, profile: StepProfile) -> Footprint:
    """Bytes of a step, with as many copies on their way as the plan allows.

    Args:
        plan: of the profile's number of layers.
        profile: what each layer makes.

    Raises:
        ConfigError: the plan has tiles, and the profile none.
    """
    pairs = zip(plan.layers, profile.layers, strict=True)
    alike = groupby(pairs, key=lambda pair: (pair[0], id(pair[1])))
    runs = [
        (layer_footprint(*first, plan.cut), 1 + len(list(others)))
        for first, others in ((next(group), group) for _, group in alike)
    ]
    return add_up(
        runs,
        profile,
        has_block_loss=plan.has_block_loss,
        num_buffers=plan.num_buffers,
        max_sending=plan.max_sending,
    )


class _Most:
    """The most bytes of those looked at, beside fixed ones and buffers."""

    def __init__(self) -> None:
        self.total = self.held = self.sent = self.working = 0
        self.where = ""

    def look(self, where: str, number: int, held: int, sent: int, working: int) -> None:
        total = held + sent + working
        if total > self.total:
            self.where = where if number < 0 else f"{where} of layer {number}"
            self.total, self.held, self.sent, self.working = total, held, sent, working


def add_up(
    runs: Sequence[tuple[LayerFootprint, int]],
    profile: StepProfile,
    *,
    has_block_loss: bool,
    num_buffers: int,
    max_sending: int,
) -> Footprint:
    """Bytes of a step of layers whose own are known; see `footprint` and `Plan`.

    What may be on its way out is what `schedule` has not waited for yet: before the forward of a layer that
    is sent later, room was made for it among those; before the backward of one that is fetched, all were sent.
    O(runs), not layers: of each run, only those are looked at where there can be most.

    Args:
        runs: layers that are alike, and how many, in the order of the forward.
    """
    most = _Most()
    held, first = 0, 0
    sending = [0] * max_sending
    most.look("embedding", -1, 0, 0, profile.outer_bytes)
    for layer, count in runs:
        waited = 1 if layer.stored_bytes else 0
        # Later layers hold more, and send as much as soon as all on their way are of this run.
        for place in range(min(count, max_sending)):
            working = pass_bytes(first + place, layer, profile)
            most.look("forward", first + place, held, sum(sending[waited:]), working)
            held += layer.resident_bytes
            if layer.stored_bytes:
                sending = [*sending[1:], layer.buffer_bytes]
        if count > max_sending:
            working = pass_bytes(first + max_sending, layer, profile)
            most.look("forward", first + max_sending, held, sum(sending[waited:]), working)
            held += layer.resident_bytes * (count - max_sending - 1)
            most.look("forward", first + count - 1, held, sum(sending[waited:]), working)
            held += layer.resident_bytes
        first += count
    head = profile.block_head_bytes if has_block_loss else profile.head_bytes
    most.look("loss", -1, held, sum(sending), runs[-1][0].input_bytes + (head or 0))
    for layer, count in reversed(runs):
        if layer.stored_bytes:
            sending = []
        most.look("backward", first - 1, held, sum(sending), layer.backward_bytes)
        first -= count
        held -= count * layer.resident_bytes
    buffers = sorted(
        size for layer, count in runs for size in [layer.buffer_bytes] * min(count, num_buffers)
    )
    buffer_bytes = sum(buffers[-num_buffers:])
    if buffer_bytes:
        buffer_bytes += profile.mover_bytes
    return Footprint(
        runs=tuple(runs),
        peak_bytes=most.total + profile.fixed_bytes + profile.given_bytes + buffer_bytes,
        peak_at=most.where,
        store_bytes=sum(layer.stored_bytes * count for layer, count in runs),
        parts={
            "parameters, gradients, optimizer": profile.fixed_bytes,
            "given to all layers": profile.given_bytes,
            "buffers": buffer_bytes,
            "held by layers": most.held,
            "on their way out": most.sent,
            "working": most.working,
        },
    )


def pass_bytes(number: int, layer: LayerFootprint, profile: StepProfile) -> int:
    """Bytes while a layer runs forward, beside what earlier ones left: see `add_up`."""
    # The first layer's input is the embedding itself, which a model of transformers holds beside later ones.
    return (profile.forward_bytes if number else 0) + layer.input_bytes + layer.forward_bytes


def layer_footprint(plan: LayerPlan, profile: LayerProfile, cut: int) -> LayerFootprint:
    """Bytes and seconds of one layer under a plan.

    Args:
        plan: the layer's.
        profile: the layer's.
        cut: see `Plan`.

    Raises:
        ConfigError: the plan has tiles, and the profile none.
    """
    if plan.mode in ("keep", "whole"):
        is_kept = plan.mode == "keep"
        moved = 0 if is_kept else _pages(profile.saved_bytes)
        return LayerFootprint(
            resident_bytes=profile.saved_bytes if is_kept else 0,
            stored_bytes=moved,
            buffer_bytes=moved,
            input_bytes=profile.input_bytes,
            forward_bytes=profile.kept.forward,
            backward_bytes=profile.kept.backward,
            forward_s=profile.forward_s,
            backward_s=profile.backward_s,
            replay_s=0.0,
        )
    tiles, items, rows = profile.tiles, profile.items, profile.num_tokens
    forward_s, replay_s, levels = profile.forward_s, profile.replay_s, profile.levels
    if plan.mode == "tiles":
        if tiles is None:
            raise ConfigError("expected a profile of tiles, as the plan has some, got none")
        items = tuple(item for item in items if item.name in (INPUT, ATTENTION))
        forward_s, replay_s = tiles.forward_s, tiles.backward_s - profile.backward_s
        levels = tiles.levels
    resident = stored = buffer = 0
    is_there = []
    for item in items:
        kept = rows_of(rows, plan.fraction(item.name), cut) if item.name not in plan.resident else 0
        whole = item.name in (INPUT, ATTENTION)
        share = plan.fraction(item.name) if whole else kept / max(rows, 1)
        if item.name in plan.resident:
            resident, share = resident + item.num_bytes, 1.0
        elif share > 0:
            stored += _pages(int(item.num_bytes * share))
            buffer += _pages(item.num_bytes)
        elif item.name == INPUT:  # nothing gives it back: without a place it stays
            resident, share = resident + item.num_bytes, 1.0
        is_there.append(share > 0)
        replay_s += (1.0 - share) * item.recompute_s
    level = _level(levels, is_there)
    return LayerFootprint(
        resident_bytes=resident,
        stored_bytes=stored,
        buffer_bytes=buffer,
        input_bytes=profile.input_bytes,
        forward_bytes=level.forward,
        backward_bytes=level.backward,
        forward_s=forward_s,
        backward_s=profile.backward_s,
        replay_s=replay_s,
    )


def _level(levels: Sequence[PassBytes], is_there: Sequence[bool]) -> PassBytes:
    """Bytes of passes where these items are there, the input among them.

    Counted for the first ones, as plans of `place` have them; for others the sum of what each one changed.
    """
    steps = zip(pairwise(levels), is_there[1:], strict=False)
    there = [pair for pair, one in steps if one]
    return PassBytes(
        forward=levels[0].forward + sum(more.forward - less.forward for less, more in there),
        backward=levels[0].backward + sum(more.backward - less.backward for less, more in there),
    )


def _pages(num_bytes: int) -> int:
    return -(-num_bytes // _PAGE) * _PAGE
