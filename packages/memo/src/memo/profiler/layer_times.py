"""Seconds of a layer's passes, of its products and attention, and of running it again."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from memo.planner.layer_plan import ATTENTION, INPUT, LayerPlan
from memo.profiler.layer_bytes import first_tensor
from memo.profiler.stopwatch import Stopwatch
from memo.runtime.attention import listening
from memo.runtime.layers import named_memory, without_cache
from memo.runtime.recording.calls import NotRepeatable, Products
from memo.runtime.recording.record import LayerRecord

__all__ = ["LayerTimes", "measure_layer"]


@dataclass(frozen=True, slots=True)
class LayerTimes:
    """What a layer's passes take.

    Attributes:
        forward_s, backward_s: without a plan.
        replay_s: to run it again when every item is there.
        call_s: of each product, by its weight's name, and of attention.
        needless: products whose result nothing reads that autograd saves.
        can_replay: whether running it again gave the same tensors and changed no buffer.
    """

    forward_s: float
    backward_s: float
    replay_s: float
    call_s: Mapping[str, float]
    can_replay: bool


def measure_layer(
    layer: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    names: list[str],
    *,
    repeats: int = 3,
) -> LayerTimes:
    """Measures a layer on an input; parameters, their gradients and buffers are left as they were.

    Args:
        layer: as it is in the model, in training mode.
        args, kwargs: what it is called with.
        names: its items, the input among them.
        repeats: of each measurement; medians count.
    """
    kwargs = without_cache(kwargs)
    gradients = {one: one.grad for one in layer.parameters()}
    buffers = {name: one.detach().clone() for name, one in layer.named_buffers()}
    source = next(one for one in (*args, *kwargs.values()) if isinstance(one, Tensor))
    given = source.detach().requires_grad_(True)
    args = tuple(given if one is source else one for one in args)
    kwargs = {key: given if one is source else one for key, one in kwargs.items()}
    device = source.device
    plan = LayerPlan(mode="restore", resident=frozenset([*names, INPUT, ATTENTION]))
    forward, backward, replay, calls = [], [], [], []
    names_of = {at: name for at, (name, _) in named_memory(layer).items()}
    try:
        for _ in range(repeats + 1):
            watch = Stopwatch(names_of, lambda: _now(device))
            with torch.enable_grad():
                started = _now(device)
                out = first_tensor(layer(*args, **kwargs))
                forward.append(_now(device) - started)
            started = _now(device)
            out.backward(torch.ones_like(out))
            backward.append(_now(device) - started)
            del out
            with torch.enable_grad():
                with listening(watch), Products(watch.product):
                    layer(*args, **kwargs)
                record = LayerRecord(
                    layer.forward,
                    args,
                    kwargs,
                    plan=plan,
                    parameters=lambda: named_memory(layer),
                    cut=16,
                    fetch=lambda _: None,
                )
                out = record.run()
            calls.append(watch.spent)
            with torch.no_grad():
                started = _now(device)
                record.restore()
                replay.append(_now(device) - started)
            del record, out
        can_replay = all(
            torch.equal(one, buffers[name]) for name, one in layer.named_buffers()
        ) and _is_repeatable(layer, args, kwargs, plan)
    except NotRepeatable:
        can_replay = False
    finally:
        for one, gradient in gradients.items():
            one.grad = gradient
        given.grad = None
        with torch.no_grad():
            for name, one in layer.named_buffers():
                one.copy_(buffers[name])
    keys = calls[-1].keys() if calls else ()
    return LayerTimes(
        forward_s=median(forward[1:] or forward),
        backward_s=median(backward[1:] or backward),
        replay_s=median(replay[1:] or replay or [0.0]),
        call_s={key: median(one[key] for one in calls[1:]) for key in keys} if calls[1:] else {},
        can_replay=can_replay,
    )


def _is_repeatable(
    layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], plan: LayerPlan
) -> bool:
    """Whether two backwards from one forward, restored twice, and a plain one agree to the bit."""
    found = []
    for way in (None, plan):
        for one in layer.parameters():
            one.grad = None
        state = torch.get_rng_state()
        try:
            with torch.enable_grad():
                if way is None:
                    out = layer(*args, **kwargs)
                else:
                    out = LayerRecord(
                        layer.forward,
                        args,
                        kwargs,
                        plan=LayerPlan(mode="restore"),
                        parameters=lambda: named_memory(layer),
                        cut=16,
                        fetch=lambda _: None,
                    ).run()
            out = first_tensor(out)
            out.backward(torch.ones_like(out))
        finally:
            torch.set_rng_state(state)
        found.append([one.grad for one in layer.parameters()])
    return all(
        (a is None and b is None) or (a is not None and b is not None and torch.equal(a, b))
        for a, b in zip(*found, strict=True)
    )


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
