"""Bytes of a layer's passes under a plan, counted on fake tensors: nothing is computed, nothing allocated.

What runs is the runtime's own recording and restoring, so that what is counted is what happens. A layer
whose shapes follow from values (experts that choose their rows) is counted as it runs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from itertools import accumulate
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from memo.planner.layer_plan import CUT, LayerPlan
from memo.planner.profile import PassBytes
from memo.profiler.calls import refusing, run_on_fakes
from memo.profiler.clock import untouched_gradients
from memo.profiler.storage_meter import Change, StorageMeter
from memo.profiler.untouched import watch_writes
from memo.runtime.layers import named_memory, without_cache
from memo.runtime.recording.calls import PRODUCTS, Products, address
from memo.runtime.recording.record import LayerRecord
from memo.runtime.tiling.record import TiledRecord
from memo.runtime.tiling.row_locality import Proofs

__all__ = [
    "LayerBytes",
    "LayerPasses",
    "count_bytes",
    "count_passes",
    "first_tensor",
    "run_backward",
]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LayerBytes:
    """What a layer's passes take.

    Attributes:
        passes: most bytes during them.
        held_bytes: what stays from the forward to the backward, the input included if it stays.
        item_bytes: of each item that was kept, by name.
        forward, backward: storages that were made and freed in each, results of products by the weight's name.
        gradient_bytes: of the result's gradients, which are there before the backward.
        is_real: whether it was counted as the layer ran.
    """

    passes: PassBytes
    held_bytes: int
    item_bytes: dict[str, int]
    forward: tuple[Change, ...] = field(default=(), compare=False, repr=False)
    backward: tuple[Change, ...] = field(default=(), compare=False, repr=False)
    gradient_bytes: int = field(default=0, compare=False)
    is_real: bool = field(default=False, compare=False)

    def passes_keeping(self, names: Collection[str]) -> PassBytes:
        """Bytes of the same passes where results of these products stay, which were computed again here."""
        made = [one.num_bytes for one in self.forward if one.num_bytes > 0 or one.name not in names]
        others = [one.num_bytes for one in self.backward if one.name not in names]
        return PassBytes(
            forward=max(accumulate(made, initial=0)),
            backward=max(accumulate(others, initial=self.gradient_bytes)),
        )


class LayerPasses(nn.Module):
    """A layer's forward and backward as a module's forward, so that its parameters can be replaced."""

    def __init__(self, layer: nn.Module, plan: LayerPlan, proofs: Proofs | None) -> None:
        super().__init__()
        self.layer, self._plan, self._proofs = layer, plan, proofs

    def forward(self, *args: Any, **kwargs: Any) -> LayerBytes:
        """Counts both passes."""
        return count_passes(self.layer, args, kwargs, self._plan, self._proofs)


def count_bytes(
    layer: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    plan: LayerPlan,
    proofs: Proofs | None = None,
    *,
    is_real: bool = False,
) -> LayerBytes:
    """Counts one forward and backward of a layer under a plan, with its items on the device.

    Args:
        layer: as it is in the model; its parameters are not touched.
        args, kwargs: what it is called with; only their shapes matter.
        plan: items that it names count as if they stayed; those that come back from a store take buffers,
            which are not counted here.
        proofs: what is known of the layer, for a plan with tiles: nothing can be found out here.
        is_real: whether the layer runs in any case, as its shapes follow from values.

    Raises:
        ConfigError: the layer fails.
    """
    kwargs = without_cache(kwargs)
    if not is_real:
        try:
            with torch.enable_grad():
                return run_on_fakes(LayerPasses(layer, plan, proofs), *args, **kwargs)
        except RuntimeError as error:
            _log.info("%s: counted as it runs, not on fakes: %s", type(layer).__name__, error)
    return replace(_count_real(layer, args, kwargs, plan, proofs), is_real=True)


def _count_real(
    layer: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    plan: LayerPlan,
    proofs: Proofs | None,
) -> LayerBytes:
    """Counts passes that are computed; gradients and random numbers are left as they were."""
    devices = list({one.device for one in layer.parameters() if one.is_cuda})
    with (
        untouched_gradients(layer),
        watch_writes(),
        torch.random.fork_rng(devices),
        torch.enable_grad(),
        refusing(layer),
    ):
        for one in layer.parameters():
            one.grad = torch.zeros_like(one) if one.requires_grad else None
        return count_passes(layer, args, kwargs, plan, proofs)


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
                _naming_products(layer, meter),
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
        items: dict[str, int] = {}
        if record is not None:
            out = record.run()
            for (
                item
            ) in record.items:  # of one weight there are several where it is used several times
                num_bytes = sum(one.num_bytes for one in item.geometry)
                items[item.name] = items.get(item.name, 0) + num_bytes
        else:
            out = layer(*args, **kwargs)
        forward, num_forward = meter.peak_bytes, meter.num_changes
        # The result itself is the next layer's input, and gone by the backward; all else of it may stay.
        result_bytes = first_tensor(out).untyped_storage().nbytes()
        held = meter.live_bytes - result_bytes
        ends = _differentiable(out)
        gradients = [torch.ones_like(one) for one in ends]
        gradient_bytes = result_bytes + sum(one.nbytes for one in gradients[1:]) if ends else 0
        before, num_before = meter.live_bytes - gradient_bytes, meter.num_changes
        meter.mark()
        if ends:
            torch.autograd.backward(ends, gradients)
        backward, num_after = meter.peak_bytes - before, meter.num_changes
    source = next(iter(given), None)
    if ends and source is not None:
        held += source.untyped_storage().nbytes()
    return LayerBytes(
        PassBytes(forward=forward, backward=backward),
        held,
        items,
        tuple(meter.changes(0, num_forward)),
        tuple(meter.changes(num_before, num_after)),
        gradient_bytes,
    )


def _naming_products(layer: nn.Module, meter: StorageMeter) -> Callable[..., Any]:
    """The layer's forward, in which results of products are named by their weights."""
    names = {key: name for key, (name, _) in named_memory(layer).items()}
    own = layer.forward

    def compute(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = function(*args, **kwargs)
        weight = args[PRODUCTS[function][1]] if len(args) > 1 else None
        if isinstance(weight, Tensor) and address(weight) in names:
            meter.name(out, names[address(weight)])
        return out

    def forward(_: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with Products(compute):
            return own(*args, **kwargs)

    return MethodType(forward, layer)


def first_tensor(value: Any) -> Tensor:
    """A layer's result: itself, or the first of several."""
    return next(one for one in tree_leaves(value) if isinstance(one, Tensor))


def run_backward(value: Any) -> None:
    """Runs a layer's backward from all tensors of its result that need a gradient."""
    ends = _differentiable(value)
    if ends:
        torch.autograd.backward(ends, [torch.ones_like(one) for one in ends])


def _differentiable(value: Any) -> list[Tensor]:
    return [one for one in tree_leaves(value) if isinstance(one, Tensor) and one.requires_grad]
