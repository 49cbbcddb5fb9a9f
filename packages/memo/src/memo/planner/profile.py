"""What a training step takes without a plan: seconds and bytes by layer, and the way to the store.

Measured by `profiler`, or computed from a device's data sheet; plans are made of nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from memo.planner.layer_plan import ATTENTION, INPUT
from shared.errors import DataError
from shared.topology.link import Link

__all__ = ["ItemProfile", "LayerProfile", "PassBytes", "StepProfile", "TilesProfile", "least_layer"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemProfile:
    """One item of a layer, see `LayerPlan`.

    Attributes:
        name: "input", "attention", or the name of a product's weight inside the layer.
        num_bytes: on the device.
        recompute_s: seconds to compute it again in the backward, other items being there; 0 for
            the input, which nothing gives back.
    """

    name: str
    num_bytes: int
    recompute_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PassBytes:
    """Most bytes on the device during a layer's passes, beyond what was there before.

    Attributes:
        forward: during its forward, its result and what stays of it included, its input not.
        backward: during its backward, the gradient of its result and of its input included; what stayed
            of it and the gradients of parameters not.
    """

    forward: int
    backward: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TilesProfile:
    """A layer's passes by tiles, see `LayerPlan`.

    Attributes:
        tile_rows: rows of a tile.
        forward_s: of its forward.
        backward_s: of its backward, what is computed again included, attention's result being there.
        levels: bytes of its passes where the input alone stays or comes back, and where attention does too.
    """

    tile_rows: int
    forward_s: float
    backward_s: float
    levels: tuple[PassBytes, PassBytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerProfile:
    """One layer's passes.

    Attributes:
        num_tokens: rows of its input.
        input_bytes: of its input.
        items: the input first, then those whose bytes save the most seconds.
        saved_bytes: all that autograd saves of it, the input included, parameters not.
        forward_s, backward_s: without a plan.
        replay_s: seconds to run it again when every item is there: its element-wise operations.
        kept: of its passes where autograd keeps everything.
        levels: of its passes where it is run again, by how many of the items stay or come back, from one
            (the input) to all.
        can_replay: whether running it again gives the same tensors and changes nothing.
        tiles: of its passes by tiles; None where it cannot go by tiles.
    """

    num_tokens: int
    input_bytes: int
    items: tuple[ItemProfile, ...]
    saved_bytes: int
    forward_s: float
    backward_s: float
    replay_s: float
    kept: PassBytes
    levels: tuple[PassBytes, ...]
    can_replay: bool = True
    tiles: TilesProfile | None = None

    def __post_init__(self) -> None:
        if len(self.levels) != len(self.items) or not self.items or self.items[0].name != INPUT:
            raise DataError(
                f"layer profile: expected a level an item and the input first, got {len(self.levels)} levels "
                f"of {[item.name for item in self.items]}"
            )

    def replay_at_s(self, num_items: int) -> float:
        """Seconds to run the layer again where so many of the items are there."""
        return self.replay_s + sum(item.recompute_s for item in self.items[num_items:])


@dataclass(frozen=True, slots=True, kw_only=True)
class StepProfile:
    """One training step, forward and backward of one micro-batch.

    Attributes:
        layers: of each of the layers, in the order of the forward; one object for all that are alike.
        num_tokens: of the batch.
        head_s: seconds of all else: embedding, loss and their backward.
        head_bytes: most bytes of all else while the loss is computed and run backward, logits among them, beyond the
            last layer's result.
        given_bytes: of all that is there from the first layer's forward to its backward beside what layers left:
            embeddings of positions, masks, what an encoder left.
        forward_bytes: of what is beside a later layer's input during the forward only, such as token embeddings.
        outer_bytes: most bytes before the first layer's forward and after its backward.
        block_head_s, block_head_bytes: head's when the loss is computed in blocks; None where it cannot.
        fixed_bytes: what is on the device throughout: parameters, their gradients, optimizer states, and
            the process itself.
        mover_bytes: of what a store takes of the device for itself, where anything is stored.
        send, fetch: the way to the store and back, measured while layers compute; None: no store.
        slowdown: factor by which passes take longer while copies run beside them, at least 1.
        input_shape: of the first layer's input; None where no batch was given.
        details: how it was made, by name: device, date, versions.
    """

    layers: tuple[LayerProfile, ...]
    num_tokens: int
    head_s: float
    head_bytes: int
    fixed_bytes: int
    given_bytes: int = 0
    forward_bytes: int = 0
    outer_bytes: int = 0
    mover_bytes: int = 0
    block_head_s: float | None = None
    block_head_bytes: int | None = None
    send: Link | None = None
    fetch: Link | None = None
    slowdown: float = 1.0
    input_shape: tuple[int, ...] | None = None
    details: Mapping[str, str] | None = None

    @property
    def kinds(self) -> list[LayerProfile]:
        """Layers that differ, in the order in which they come."""
        return list({id(one): one for one in self.layers}.values())

    @property
    def passes_s(self) -> float:
        """Seconds of all layers' passes where autograd keeps everything."""
        return sum(one.forward_s + one.backward_s for one in self.layers)

    def with_layers(self, change: Callable[[LayerProfile], LayerProfile]) -> StepProfile:
        """The same step with each of its kinds of layers changed."""
        changed = {id(one): change(one) for one in self.kinds}
        return replace(self, layers=tuple(changed[id(one)] for one in self.layers))


def least_layer(
    num_tokens: int,
    input_bytes: int,
    item_bytes: Mapping[str, int],
    saved_bytes: int,
    kept: PassBytes,
    tiles: TilesProfile | None = None,
) -> LayerProfile:
    """A layer no plan of which takes more bytes than that plan of the real one; its seconds are 0.

    When the backward of a layer begins that ran again, all that autograd saves of it is there, whichever items
    stayed or came back. So none takes less than one with the input alone that has, for a moment, what is saved.

    Args:
        item_bytes: of each item, by name.
        num_tokens, input_bytes, saved_bytes, kept, tiles: see `LayerProfile`.
    """
    names = [name for name in (INPUT, ATTENTION) if name in item_bytes]
    there, levels = 0, []
    for name in names:
        there += item_bytes[name]
        levels.append(PassBytes(forward=0, backward=max(0, saved_bytes - there)))
    return LayerProfile(
        num_tokens=num_tokens,
        input_bytes=input_bytes,
        items=tuple(
            ItemProfile(name=name, num_bytes=item_bytes[name], recompute_s=0.0) for name in names
        ),
        saved_bytes=saved_bytes,
        forward_s=0.0,
        backward_s=0.0,
        replay_s=0.0,
        kept=kept,
        levels=tuple(levels),
        tiles=tiles,
    )
