"""Times the operators of running training steps, forward and backward, in each uniform precision.

Hooks mark when an operator begins and ends: around a module's forward, and around the nodes that it
adds to the autograd graph. What lies between two operators, launch gaps included, is the time before
the later one. Steps without hooks say how long a step takes as a whole. Precisions take turns, so that
all are measured in the same minutes of a machine.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from qsync.precisions import HIGHEST
from qsync.profiler.gradients import LossFunction, check_loss
from qsync.profiler.state import keep_precisions, preserve_state
from qsync.runtime.modules import list_inputs, list_operators, set_precision

__all__ = ["END", "StepSeconds", "time_precisions", "watch_operators"]

END = ""
"""Name of what follows the last operator: the loss, and its backward pass."""

_NUM_STEPS = 5
# A precision this many times slower than float32 is of no use: two steps say so.
_HOPELESS = 4.0


@dataclass(frozen=True, slots=True)
class StepSeconds:
    """Seconds of one step's parts.

    Attributes:
        forward_s, backward_s: of each operator.
        forward_gap_s, backward_gap_s: of what runs before each operator, and of `END`.
    """

    forward_s: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    backward_s: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    forward_gap_s: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    backward_gap_s: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    @property
    def parts(self) -> tuple[dict[str, float], ...]:
        """The four tables."""
        return self.forward_s, self.backward_s, self.forward_gap_s, self.backward_gap_s

    @property
    def total_s(self) -> float:
        """Seconds of the step."""
        return sum(sum(part.values()) for part in self.parts)


def time_precisions(
    model: nn.Module,
    batches: Sequence[Any],
    loss_fn: LossFunction,
    precisions: Sequence[str],
) -> dict[str, StepSeconds]:
    """Measures steps in which all operators compute in one precision.

    Args:
        model: model; it is left as it was.
        batches: training batches, read in turns.
        loss_fn: returns the loss of (model, batch).
        precisions: names to measure; float32 is one of them.

    Returns:
        By precision, the median of each part, scaled so that the parts add up to the median of steps
        without hooks.
    """
    steps: dict[str, list[StepSeconds]] = {name: [] for name in precisions}
    whole_s: dict[str, list[float]] = {name: [] for name in precisions}
    operators = list_operators(model)
    with preserve_state(model), keep_precisions(model):
        for index in range(_NUM_STEPS + 1):
            for precision in precisions:
                if len(whole_s[precision]) == 2 and min(whole_s[precision]) > _HOPELESS * min(
                    whole_s[HIGHEST]
                ):
                    continue
                for module in operators.values():
                    set_precision(module, precision)
                batch = batches[index % len(batches)]
                steps[precision].append(_time_parts(model, batch, loss_fn))
                whole_s[precision].append(_time_step(model, batch, loss_fn))
    # The first step of each precision compiles kernels and fills caches.
    return {
        precision: _take_medians(steps[precision][1:], whole_s[precision][1:])
        for precision in precisions
    }


@contextmanager
def watch_operators(
    model: nn.Module,
    before: Callable[[str, tuple[Any, ...]], None],
    after: Callable[[str, tuple[Any, ...], Any], None],
) -> Iterator[None]:
    """Calls `before` and `after` around each operator's forward while the block runs.

    Args:
        model: model.
        before: called with (operator, inputs).
        after: called with (operator, inputs, output).
    """
    handles = []
    for name, module in list_operators(model).items():
        handles.append(
            module.register_forward_pre_hook(
                lambda _, args, words, name=name: before(name, list_inputs(args, words)),
                with_kwargs=True,
            )
        )
        handles.append(
            module.register_forward_hook(
                lambda _, args, words, output, name=name: after(
                    name, list_inputs(args, words), output
                ),
                with_kwargs=True,
            )
        )
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class _Marks:
    """Moments at which a step goes from one part to another."""

    def __init__(self, model: nn.Module) -> None:
        parameter = next(model.parameters(), None)
        self._is_cuda = parameter is not None and parameter.is_cuda
        self._marks: list[tuple[Any, str, str]] = []
        self._handles: list[Any] = []
        self._parameters = {
            name: {id(each) for each in module.parameters(recurse=False)}
            for name, module in list_operators(model).items()
        }

    def add(self, event: str, name: str = END) -> None:
        """Marks "enter" or "exit" of an operator, or "begin", "backward" or "end" of the step."""
        if self._is_cuda:
            stamp = torch.cuda.Event(enable_timing=True)
            stamp.record()
        else:
            stamp = time.perf_counter()
        self._marks.append((stamp, event, name))

    def leave(self, name: str, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Marks the end of an operator's forward, and watches its part of the backward pass."""
        self.add("exit", name)
        stops = {each.grad_fn for each in inputs if isinstance(each, Tensor)}
        pending, seen = [output.grad_fn], set(stops)
        while pending:
            node = pending.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            variable = getattr(node, "variable", None)
            if variable is not None and id(variable) not in self._parameters[name]:
                continue
            for register, event in ((node.register_prehook, "enter"), (node.register_hook, "exit")):
                self._handles.append(register(partial(self._mark_node, event, name)))
            pending += [following for following, _ in node.next_functions]

    def _mark_node(self, event: str, name: str, *_: Any) -> None:
        self.add(event, name)

    def sum_up(self) -> StepSeconds:
        """Adds up each part, and ends the watch; time within two operators belongs to the inner one."""
        # DDP keeps the nodes of parameters alive, and with them the hooks.
        for handle in self._handles:
            handle.remove()
        if self._is_cuda:
            torch.cuda.synchronize()
            first = self._marks[0][0]
            times = [first.elapsed_time(stamp) / 1e3 for stamp, _, _ in self._marks]
        else:
            times = [stamp for stamp, _, _ in self._marks]
        seconds = StepSeconds()
        own, gaps = seconds.forward_s, seconds.forward_gap_s
        within: list[str] = []
        gap_s, last = 0.0, END
        for before_s, now_s, (_, event, name) in zip(
            times, times[1:], self._marks[1:], strict=False
        ):
            if within:
                own[within[-1]] += now_s - before_s
            else:
                gap_s += now_s - before_s
            is_forward = gaps is seconds.forward_gap_s
            if event == "enter":
                if not within:
                    gaps[name if is_forward else last] += gap_s
                    gap_s = 0.0
                within.append(name)
            elif event == "exit":
                within.pop()
                last = name
            else:
                gaps[END if is_forward else last] += gap_s
                gap_s, last = 0.0, END
                own, gaps = seconds.backward_s, seconds.backward_gap_s
        return seconds


def _time_parts(model: nn.Module, batch: Any, loss_fn: LossFunction) -> StepSeconds:
    marks = _Marks(model)
    with watch_operators(model, lambda name, _: marks.add("enter", name), marks.leave):
        _run_step(model, batch, loss_fn, marks.add)
    return marks.sum_up()


def _time_step(model: nn.Module, batch: Any, loss_fn: LossFunction) -> float:
    marks = _Marks(model)
    _run_step(model, batch, loss_fn, marks.add)
    return marks.sum_up().total_s


def _run_step(
    model: nn.Module, batch: Any, loss_fn: LossFunction, mark: Callable[[str], None]
) -> None:
    for parameter in model.parameters():
        parameter.grad = None
    with torch.enable_grad():
        mark("begin")
        loss = check_loss(loss_fn(model, batch))
        mark("backward")
        loss.backward()
        mark("end")


def _take_medians(steps: Sequence[StepSeconds], whole_s: Sequence[float]) -> StepSeconds:
    median = StepSeconds()
    for k, part in enumerate(median.parts):
        for name in dict.fromkeys(name for step in steps for name in step.parts[k]):
            part[name] = float(np.median([step.parts[k].get(name, 0.0) for step in steps]))
    scale = float(np.median(whole_s)) / median.total_s
    for part in median.parts:
        for name in part:
            part[name] *= scale
    return median
