"""Seconds of a layer's passes, of its products and attention, and of running it again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from memo.planner.layer_plan import ATTENTION, CUT, INPUT, LayerPlan
from memo.profiler.clock import now, untouched_gradients
from memo.profiler.layer_bytes import run_backward
from memo.profiler.timing.stopwatch import Stopwatch
from memo.profiler.untouched import watch_writes
from memo.runtime.attention import Answer, listening
from memo.runtime.layers import named_memory, without_cache
from memo.runtime.recording.arguments import input_of
from memo.runtime.recording.calls import NotRepeatable, Products
from memo.runtime.recording.record import LayerRecord

__all__ = ["LayerTimes", "are_as_close", "forward_s", "longer_s", "measure_layer"]

_NOISES, _ROUNDING = 4.0, 0.02
"""Times by which gradients of a layer that was run again may differ more than those of two plain runs, and what
these may differ by, of their norm, for that to be rounding."""

_AGREEING = 1.05
"""Times by which two measurements that agree may differ."""


@dataclass(frozen=True, slots=True)
class LayerTimes:
    """What a layer's passes take.

    Attributes:
        forward_s, backward_s: without a plan.
        replay_s: to run it again when every item is there.
        attention_backward_s: of attention's own backward; 0 where the layer calls none.
        call_s: of each product, by its weight's name, and of attention.
        can_replay: whether running it again gave the same tensors and changed no buffer.
    """

    forward_s: float
    backward_s: float
    replay_s: float
    attention_backward_s: float
    call_s: Mapping[str, float]
    can_replay: bool

    def scaled(self, factor: int) -> LayerTimes:
        """At so many times the tokens of each sequence: attention's seconds grow with the square."""
        return replace(
            self,
            forward_s=longer_s(self.forward_s, self.call_s.get(ATTENTION, 0.0), factor),
            backward_s=longer_s(self.backward_s, self.attention_backward_s, factor),
            replay_s=self.replay_s * factor,
            attention_backward_s=self.attention_backward_s * factor**2,
            call_s={
                name: seconds * factor ** (2 if name == ATTENTION else 1)
                for name, seconds in self.call_s.items()
            },
        )


def longer_s(seconds: float, attention_s: float, factor: int) -> float:
    """Seconds at so many times the tokens of each sequence, given those of attention among them."""
    return (seconds - attention_s) * factor + attention_s * factor**2


def measure_layer(
    layer: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    names: list[str],
    *,
    repeats: int = 4,
) -> LayerTimes:
    """Measures a layer on an input, inside of `untouched`; gradients of its parameters are left as they were.

    Args:
        layer: as it is in the model, in training mode.
        args, kwargs: what it is called with; its input is the first tensor, and needs a gradient.
        names: its items, the input among them.
        repeats: most of each measurement; the quickest counts, as what else runs only adds to it. Fewer do where
            two agree.
    """
    kwargs = without_cache(kwargs)
    buffers = {name: one.detach().clone() for name, one in layer.named_buffers()}
    source = input_of(args, kwargs)
    with watch_writes(), torch.no_grad():
        layer(*args, **kwargs)
    device = source.device
    plan = LayerPlan(mode="restore", resident=frozenset([*names, INPUT, ATTENTION]))
    forward, backward, replay, calls = [], [], [], []
    names_of = {at: name for at, (name, _) in named_memory(layer).items()}
    attention = _AttentionBackward(device)
    try:
        with untouched_gradients(layer, source):
            for _ in range(repeats + 1):
                watch = Stopwatch(names_of, lambda: now(device))
                with torch.enable_grad():
                    started = now(device)
                    out = layer(*args, **kwargs)
                    forward.append(now(device) - started)
                started = now(device)
                run_backward(out)
                backward.append(now(device) - started)
                del out
                with torch.enable_grad():
                    with listening(watch), Products(watch.product):
                        layer(*args, **kwargs)
                    record = _record(layer, args, kwargs, plan)
                    out = record.run()
                calls.append(watch.spent)
                with torch.no_grad():
                    started = now(device)
                    if record.items:  # else nothing was saved
                        record.restore()
                    replay.append(now(device) - started)
                del record, out
                with torch.no_grad(), listening(attention):
                    layer(*args, **kwargs)
                if all(_has_settled(seconds[1:]) for seconds in (forward, backward, replay)):
                    break
            can_replay = all(
                torch.equal(one, buffers[name]) for name, one in layer.named_buffers()
            ) and _is_repeatable(layer, args, kwargs)
    except NotRepeatable:
        can_replay = False
    keys = calls[-1].keys() if calls else ()
    return LayerTimes(
        forward_s=min(forward[1:] or forward),
        backward_s=min(backward[1:] or backward),
        replay_s=min(replay[1:] or replay or [0.0]),
        attention_backward_s=min(attention.seconds[1:] or [0.0]),
        call_s={key: min(one[key] for one in calls[1:]) for key in keys} if calls[1:] else {},
        can_replay=can_replay,
    )


def _has_settled(seconds: list[float]) -> bool:
    """Whether the quickest of several measurements is no accident: a second one takes as long."""
    quickest = sorted(seconds)[:2]
    return len(quickest) == 2 and quickest[1] <= _AGREEING * quickest[0]


def forward_s(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
    """Seconds of a layer's forward without gradients, the second time it is run."""
    kwargs, device = without_cache(kwargs), input_of(args, kwargs).device
    with torch.no_grad():
        with watch_writes():
            layer(*args, **kwargs)
        started = now(device)
        layer(*args, **kwargs)
        return now(device) - started


class _AttentionBackward:
    """Runs attention's backward by itself, and takes its time."""

    def __init__(self, device: torch.device) -> None:
        self.seconds: list[float] = []
        self._device = device

    def attend(self, call: partial[Answer], query: Tensor, key: Tensor, value: Tensor) -> Answer:
        module, _, _, _, *args = call.args
        leaves = [one.detach().requires_grad_(True) for one in (query, key, value)]
        with torch.enable_grad(), listening(None):
            out = call.func(module, *leaves, *args, **call.keywords)[0]
        started = now(self._device)
        out.backward(torch.ones_like(out))
        self.seconds.append(now(self._device) - started)
        return call()


def _record(
    layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], plan: LayerPlan
) -> LayerRecord:
    return LayerRecord(
        layer.forward,
        args,
        kwargs,
        plan=plan,
        parameters=lambda: named_memory(layer),
        cut=CUT,
        fetch=lambda _: None,
    )


def _is_repeatable(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a plain backward and one that runs the whole layer again agree to the bit.

    On a GPU, whose attention adds up in any order in its backward, two plain ones may not: see `are_as_close`.
    """
    plain, again = (_gradients(layer, args, kwargs, is_plain=way) for way in (True, False))
    if [one is None for one in plain] != [one is None for one in again]:
        return False
    pairs = [(a, b) for a, b in zip(plain, again, strict=True) if a is not None and b is not None]
    if all(torch.equal(a, b) for a, b in pairs):
        return True
    if input_of(args, kwargs).device.type == "cpu":
        return False
    repeated = [one for one in _gradients(layer, args, kwargs, is_plain=True) if one is not None]
    return all(are_as_close(a, b, c) for (a, b), c in zip(pairs, repeated, strict=True))


def are_as_close(plain: Tensor, again: Tensor, repeated: Tensor) -> bool:
    """Whether one gradient differs from a plain one by no more than a few times what plain ones differ by.

    Plain ones that differ by more than rounding come from a layer that does something else each time.
    """
    noise = (plain.float() - repeated.float()).norm()
    is_rounding = bool(noise <= _ROUNDING * plain.float().norm())
    return is_rounding and bool((plain.float() - again.float()).norm() <= _NOISES * noise)


def _gradients(
    layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, is_plain: bool
) -> list[Tensor | None]:
    """Gradients of a layer's parameters, drawn from the random numbers there are, which are left so."""
    device = input_of(args, kwargs).device
    for one in layer.parameters():
        one.grad = None
    with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.enable_grad():
        if is_plain:
            out = layer(*args, **kwargs)
        else:
            out = _record(layer, args, kwargs, LayerPlan(mode="restore")).run()
        run_backward(out)
    return [one.grad for one in layer.parameters()]
