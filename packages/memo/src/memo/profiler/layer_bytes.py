"""Bytes of a layer's passes under a plan, counted on fake tensors: nothing is computed, nothing allocated.

What runs is the runtime's own recording and restoring, so that what is counted is what happens. A layer
whose shapes follow from values (experts that choose their rows) is counted as it runs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.func import functional_call
from torch.utils._pytree import tree_map

from memo.planner.layer_plan import CUT, LayerPlan
from memo.planner.profile import PassBytes
from memo.profiler.clock import untouched_gradients
from memo.profiler.head import refuse_batch
from memo.profiler.storage_meter import StorageMeter
from memo.profiler.untouched import watch_writes
from memo.runtime.layers import named_memory, without_cache
from memo.runtime.recording.record import LayerRecord
from memo.runtime.tiling.record import TiledRecord
from memo.runtime.tiling.row_locality import Proofs

__all__ = ["LayerBytes", "count_bytes", "count_passes", "first_tensor"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LayerBytes:
    """What a layer's passes take.

    Attributes:
        passes: most bytes during them.
        held_bytes: what stays from the forward to the backward, the input included if it stays.
        item_bytes: of each item that was kept, by name.
    """

    passes: PassBytes
    held_bytes: int
    item_bytes: dict[str, int]


class _Passes(nn.Module):
    """A layer's forward and backward as a module's forward, so that its parameters can be replaced."""

    def __init__(self, layer: nn.Module, run: Callable[..., LayerBytes]) -> None:
        super().__init__()
        self.layer, self._run = layer, run

    def forward(self, *args: Any, **kwargs: Any) -> LayerBytes:
        return self._run(self.layer, args, kwargs)


def count_bytes(
    layer: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    plan: LayerPlan,
    proofs: Proofs | None = None,
) -> LayerBytes:
    """Counts one forward and backward of a layer under a plan, with its items on the device.

    Args:
        layer: as it is in the model; its parameters are not touched.
        args, kwargs: what it is called with; only their shapes matter.
        plan: items that it names count as if they stayed; those that come back from a store take buffers,
            which are not counted here.
        proofs: what is known of the layer, for a plan with tiles: nothing can be found out here.
    """
    kwargs = without_cache(kwargs)
    try:
        return _count_fake(layer, args, kwargs, plan, proofs)
    except RuntimeError as error:
        _log.info("%s: counted as it runs, not on fake tensors: %s", type(layer).__name__, error)
        return _count_real(layer, args, kwargs, plan, proofs)


def _count_fake(
    layer: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    plan: LayerPlan,
    proofs: Proofs | None,
) -> LayerBytes:
    mode = FakeTensorMode(allow_non_fake_inputs=True)

    def fake(value: Any) -> Any:
        if isinstance(value, FakeTensor) or not isinstance(value, Tensor):
            return value
        return mode.from_tensor(value.detach()).requires_grad_(value.requires_grad)

    tensors = {
        f"layer.{name}": nn.Parameter(fake(one), one.requires_grad)
        if isinstance(one, nn.Parameter)
        else fake(one)
        for name, one in (*layer.named_parameters(), *layer.named_buffers())
    }
    args, kwargs = tree_map(fake, (args, kwargs))

    def run(inner: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> LayerBytes:
        return count_passes(inner, args, kwargs, plan, proofs)

    with mode:
        for one in tensors.values():
            if one.requires_grad:
                one.grad = torch.zeros_like(one)
        return functional_call(_Passes(layer, run), tensors, args, kwargs)


def _count_real(
    layer: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    plan: LayerPlan,
    proofs: Proofs | None,
) -> LayerBytes:
    """Counts passes that are computed; gradients and random numbers are left as they were."""
    devices = list({one.device for one in layer.parameters() if one.is_cuda})
    try:
        with (
            untouched_gradients(layer),
            watch_writes(),
            torch.random.fork_rng(devices),
            torch.enable_grad(),
        ):
            for one in layer.parameters():
                one.grad = torch.zeros_like(one) if one.requires_grad else None
            return count_passes(layer, args, kwargs, plan, proofs)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise refuse_batch(layer, error) from error


def count_passes(
    layer: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    plan: LayerPlan,
    proofs: Proofs | None = None,
) -> LayerBytes:
    """Counts passes of a layer whose parameters have gradients; see `count_bytes`."""
    record: LayerRecord | TiledRecord | None = None
    with StorageMeter() as meter:
        given = [one for one in (*args, *kwargs.values()) if isinstance(one, Tensor)]
        meter.ignore(*given)
        if plan.mode == "restore":
            record = LayerRecord(
                layer.forward,
                args,
                kwargs,
                plan=plan,
                parameters=lambda: named_memory(layer),
                cut=CUT,
                fetch=lambda _: None,
            )
        elif plan.mode == "tiles":
            assert proofs is not None
            record = TiledRecord(
                layer,
                layer.forward,
                args,
                kwargs,
                plan=plan,
                proofs=proofs,
                fetch=lambda _: None,
            )
        if record is not None:
            out = first_tensor(record.run())
            items = {item.name: sum(g.num_bytes for g in item.geometry) for item in record.items}
        else:
            out, items = first_tensor(layer(*args, **kwargs)), {}
        forward = meter.peak_bytes
        held = meter.live_bytes - out.untyped_storage().nbytes()
        gradient = torch.ones_like(out)
        # The result itself is the next layer's input, and gone by now.
        before = meter.live_bytes - out.untyped_storage().nbytes()
        meter.mark()
        out.backward(gradient)
        backward = meter.peak_bytes - before
    del out
    source = next(iter(given), None)
    input_bytes = 0 if source is None else source.untyped_storage().nbytes()
    return LayerBytes(PassBytes(forward=forward, backward=backward), held + input_bytes, items)


def first_tensor(value: Any) -> Tensor:
    """A layer's result: itself, or the first of several."""
    return value if isinstance(value, Tensor) else first_tensor(next(iter(value)))
