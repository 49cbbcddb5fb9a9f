"""What a step takes outside its layers: embedding, head and loss, with layers that pass their input on."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from transformers.cache_utils import Cache

from memo.profiler.calls import (
    LayerCall,
    count_given,
    pass_on,
    refusing,
    replaced,
    run_on_fakes,
    tensors_by_path,
)
from memo.profiler.clock import now, untouched_gradients
from memo.profiler.storage_meter import StorageMeter
from memo.profiler.untouched import watch_writes
from memo.runtime.layers import without_cache
from memo.runtime.recording.arguments import input_of, tensors_in
from memo.runtime.recording.calls import address
from shared.errors import ConfigError

__all__ = ["OutsideBytes", "count_outside", "loss_of", "measure_head"]

_log = logging.getLogger(__name__)

Calls = Sequence[LayerCall | None]


@dataclass(frozen=True, slots=True)
class OutsideBytes:
    """Bytes outside of the layers, gradients of parameters left out.

    Attributes:
        given_bytes, forward_bytes, head_bytes, outer_bytes: see `StepProfile`.
        needing: of each layer that is called, the paths to tensors among its arguments that need a gradient.
    """

    given_bytes: int
    forward_bytes: int
    head_bytes: int
    outer_bytes: int
    needing: Mapping[int, frozenset[str]]


def count_outside(
    model: nn.Module,
    layers: Sequence[nn.Module],
    calls: Calls,
    batch: Mapping[str, Any],
    *,
    is_real: bool = False,
) -> OutsideBytes:
    """Counts bytes of a forward and a backward without the layers.

    On fake tensors: nothing is computed, nothing allocated. Where shapes follow from values, as where only some
    tokens' logits count, they are counted as the model runs.

    Args:
        model: inside of `untouched`.
        layers: its layers.
        calls: of its layers, on this batch.
        batch: its arguments.
        is_real: whether it runs in any case.

    Raises:
        ConfigError: the model fails on this batch, or nothing of its result needs a gradient.
    """
    counted = _Counted(model, layers, calls)
    if not is_real:
        try:
            with torch.enable_grad():
                return run_on_fakes(counted, **batch)
        except Exception as error:  # noqa: BLE001 - what a model raises on real tensors is its own error
            _log.info("%s: run, as it fails on fake tensors: %s", type(model).__name__, error)
    with untouched_gradients(model), torch.enable_grad(), refusing(model), watch_writes():
        for one in model.parameters():
            one.grad = torch.zeros_like(one) if one.requires_grad else None
        return counted(**batch)


class _Counted(nn.Module):
    """A model that counts what it takes outside of its layers."""

    def __init__(self, model: nn.Module, layers: Sequence[nn.Module], calls: Calls) -> None:
        super().__init__()
        self.model = model
        self._layers, self._calls = list(layers), calls  # a list: no submodules of this one

    def forward(self, **batch: Any) -> OutsideBytes:
        watch = _Watch()
        forwards = [
            _stub(layer, call, watch, number)
            for number, (layer, call) in enumerate(zip(self._layers, self._calls, strict=True))
        ]
        with watch.meter, replaced(self._layers, forwards):
            loss = loss_of(self.model(**batch))
            if not loss.requires_grad:
                raise ConfigError(
                    f"{type(self.model).__name__}: expected a loss that needs a gradient, got one that none of the "
                    "trained parameters reaches; plan for the model that your loop trains"
                )
            loss.backward()
        given = [(call.args, call.kwargs) for call in self._calls if call is not None]
        before = max(call.before_bytes for call in self._calls if call is not None)
        return watch.outside(count_given(given, batch), before)


class _Watch:
    """Most bytes between the layers' passes, and bytes that are there at each."""

    def __init__(self) -> None:
        self.meter = StorageMeter()
        self._needing: dict[int, frozenset[str]] = {}
        self._given: dict[int, Tensor] = {}
        self._inner: list[int] = []
        self._forward: list[int] = []
        self._backward: list[int] = []
        self._source_bytes = 0

    def enter(self, number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Notes what is there before a layer's forward."""
        source = input_of(args, kwargs)
        tensors = tensors_by_path(args, kwargs)
        self._needing[number] = frozenset(
            path for path, one in tensors.items() if one.requires_grad
        )
        self._given |= {address(one): one for one in tensors.values() if one is not source}
        if self._forward:
            self._inner.append(self.meter.peak_bytes)
        self._source_bytes = self.meter.bytes_of(source)
        self._forward.append(self.meter.live_bytes - self._source_bytes)
        self.meter.mark()

    def leave(self, gradient: Tensor) -> None:
        """Notes what is there before a layer's backward."""
        self._inner.append(self.meter.peak_bytes)
        self._backward.append(self.meter.live_bytes - self.meter.bytes_of(gradient))
        self.meter.mark()

    def outside(self, given_bytes: int, before_bytes: int) -> OutsideBytes:
        """What was noted, when the backward is over.

        Args:
            given_bytes: of what layers are given in a real step. On fake tensors models make masks that they do
                without where they can look at values.
            before_bytes: see `LayerCall`, for the same reason.
        """
        if not self._backward:  # no layer is run backward: all of it is the head's
            self._inner.append(self.meter.peak_bytes)
        given = max([*self._forward[:1], *self._backward], default=0)
        made = sum(map(self.meter.bytes_of, self._given.values()))
        return OutsideBytes(
            given_bytes=given - made + given_bytes,
            forward_bytes=max(0, max(self._forward[1:], default=0) - given),
            head_bytes=max(0, max(self._inner, default=0) - given - self._source_bytes),
            outer_bytes=max(0, before_bytes, self.meter.peak_bytes - given),
            needing=self._needing,
        )


def _stub(
    layer: nn.Module, call: LayerCall | None, watch: _Watch | None, number: int
) -> Callable[..., Any]:
    """A layer's forward that returns its input, and needs gradients as the layer itself does."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        assert call is not None
        args = tuple(None if isinstance(one, Cache) else one for one in args)
        kwargs = without_cache(kwargs)
        source = input_of(args, kwargs)
        if watch is not None:
            watch.enter(number, args, kwargs)
        others = [
            one
            for one in tensors_in((args, kwargs))
            if one is not source and one.requires_grad and one.is_floating_point()
        ]
        is_trained = any(one.requires_grad for one in layer.parameters())
        anchor = None
        if watch is not None or others or (is_trained and not source.requires_grad):
            anchor = torch.zeros((), device=source.device, requires_grad=is_trained)
            for one in others:
                anchor = anchor + one.reshape(-1)[:1].sum().to(anchor.dtype) * 0
        out = pass_on(call.result, source, anchor)
        result = next(one for one in tree_leaves(out) if isinstance(one, Tensor))
        if watch is not None and result.requires_grad:
            result.register_hook(watch.leave)
        return out

    return forward


def measure_head(
    model: nn.Module,
    layers: Sequence[nn.Module],
    calls: Calls,
    batch: Mapping[str, Any],
    *,
    repeats: int = 2,
) -> float:
    """Seconds of forward and backward without the layers; gradients are left as they were.

    Args:
        model, layers, calls, batch: see `count_outside`.
        repeats: of which the quickest counts.

    Raises:
        ConfigError: the model fails on this batch.
    """
    device = next(model.parameters()).device
    seconds = []
    with _without_layers(model, layers, calls):
        with watch_writes():
            loss_of(model(**batch)).backward()
        for _ in range(repeats):
            started = now(device)
            loss_of(model(**batch)).backward()
            seconds.append(now(device) - started)
    return min(seconds)


@contextmanager
def _without_layers(model: nn.Module, layers: Sequence[nn.Module], calls: Calls) -> Iterator[None]:
    """For a model that is run forward and backward with layers that pass their input on."""
    forwards = [
        _stub(layer, call, None, number)
        for number, (layer, call) in enumerate(zip(layers, calls, strict=True))
    ]
    with (
        untouched_gradients(model),
        replaced(layers, forwards),
        torch.enable_grad(),
        refusing(model),
    ):
        yield


def loss_of(out: Any) -> Tensor:
    """What a model's result is run backward from: its loss, or the sum of its logits or first tensor.

    Raises:
        ConfigError: it has none of them.
    """
    loss = getattr(out, "loss", None)
    if loss is None and isinstance(out, Mapping):
        loss = out.get("loss")
    if isinstance(loss, Tensor):
        return loss
    if isinstance(out, Tensor):
        return out.float().sum()
    logits = getattr(out, "logits", None)
    if isinstance(logits, Tensor):
        return logits.float().sum()
    values = out.values() if isinstance(out, Mapping) else out
    for one in values if isinstance(values, Iterable) else ():
        if isinstance(one, Tensor):
            return one.float().sum()
    raise ConfigError(
        f"expected a model that returns a loss, logits or another tensor, got {type(out).__name__}; have its forward "
        "return the loss that your loop runs backward"
    )
