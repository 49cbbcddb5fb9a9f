"""What a training step takes without a plan: seconds and bytes by layer, and the way to the store.

Measured by `profiler`, or computed from a device's data sheet; plans are made of nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shared.topology.link import Link

__all__ = ["ItemProfile", "LayerProfile", "StepProfile"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemProfile:
    """One item of a layer, see `LayerPlan`.

    Attributes:
        name: "input", "attention", or the name of a product's weight inside the layer.
        num_bytes: on the device.
        recompute_s: seconds to compute it again in the backward, other items being there; for the
            input infinity, as nothing gives it back.
    """

    name: str
    num_bytes: int
    recompute_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerProfile:
    """One layer's passes.

    Attributes:
        items: in the order of the forward, the input first.
        saved_bytes: all that autograd saves of it, the input included, parameters not.
        restored_bytes: what running it again makes beside its items: results of element-wise operations.
        forward_s, backward_s: without a plan.
        replay_s: seconds to run it again when every item is there: its element-wise operations.
        forward_bytes: most bytes during its forward, beside what it was given and what it saves.
        backward_bytes: most bytes during its backward, beside saved tensors and the gradients of
            parameters, the gradient of its result included.
        can_replay: whether running it again gives the same tensors and changes nothing.
    """

    items: tuple[ItemProfile, ...]
    saved_bytes: int
    restored_bytes: int
    forward_s: float
    backward_s: float
    replay_s: float
    forward_bytes: int
    backward_bytes: int
    can_replay: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class StepProfile:
    """One training step, forward and backward of one micro-batch.

    Attributes:
        layer: of each of the layers, which are alike.
        num_layers: how many there are.
        num_tokens: of the batch.
        head_s: seconds of all else: embedding, loss and their backward.
        head_bytes: most bytes of all else while the loss is computed and run backward, logits among them.
        block_head_s, block_head_bytes: the same when the loss is computed in blocks; None where it cannot.
        fixed_bytes: what is on the device throughout: parameters, their gradients, optimizer states, and
            the process itself.
        send, fetch: the way to the store and back, measured while layers compute; None: no store.
        slowdown: factor by which passes take longer while copies run beside them, at least 1.
        details: how it was made, by name: device, date, versions.
    """

    layer: LayerProfile
    num_layers: int
    num_tokens: int
    head_s: float
    head_bytes: int
    fixed_bytes: int
    block_head_s: float | None = None
    block_head_bytes: int | None = None
    send: Link | None = None
    fetch: Link | None = None
    slowdown: float = 1.0
    details: Mapping[str, str] | None = None
