"""Cuts traced models into parts of the batch, in the same ranges on all ranks, and checks the results.

After the partition pass of Lancet (arXiv 2404.19429). The model is traced once more with the size of its
batch as a symbol, each rank times its operators on the whole batch and on parts, and rank 0 chooses the
ranges from the times of all. Lancet cuts the forward pass alone; here both passes have parts.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace
from typing import Any, NoReturn

import torch
from torch import Tensor, fx, nn
from torch._dynamo.exc import TensorifyScalarRestartAnalysis

from lancet.graph.batch_axes import (
    BatchAxes,
    drop_unused_sizes,
    find_batch_axes,
    fix_sizes,
    list_exchanges,
    mark_sizes,
)
from lancet.graph.capture import digest_lines
from lancet.graph.parts import cut
from lancet.planner.batch_cut import BatchCut
from lancet.planner.partition import (
    LEAST_GAIN,
    ChosenRanges,
    PartCosts,
    choose_ranges,
    merge_costs,
)
from lancet.profiler import time_parts
from lancet.runtime.agreement import run_on_all, share_text, share_texts
from lancet.runtime.verification import NUM_ROUNDINGS, find_difference
from shared.comms import Group
from shared.errors import ConfigError
from shared.units import format_bytes, format_s

__all__ = ["BatchCutter"]

# Numbers of parts that are tried where costs decide.
_NUMBERS = (2, 4, 8)
_AS_LOADED = "as in the loaded plan"


class BatchCutter:
    """Cuts the training graphs of one model, the first after all ranks have timed it.

    Args:
        group: ranks over which the model's experts are divided.
        control: a gloo group of the same ranks.
        num_parts: parts of each range; None: costs decide, and the batch may stay whole.
        memory_bytes: what parts may add to a rank's memory; None for no limit.

    Attributes:
        cut: the first graph's ranges; nothing before it.
        sentence: what has become of the batch; empty before the first training graph.
    """

    def __init__(
        self, group: Group, control: Group, num_parts: int | None, memory_bytes: int | None
    ) -> None:
        self._group, self._control = group, control
        self._num_parts, self._memory_bytes = num_parts, memory_bytes
        self.cut = BatchCut()
        self.sentence = ""
        # Digest of the first graph without the shapes of its inputs, once it is cut.
        self._program = ""
        self._is_whole = False
        # Inputs are marked from one trace of a graph to the next one of the same graph.
        self._marks = contextlib.ExitStack()
        self._traces_sizes = False

    def compile(
        self,
        module: fx.GraphModule,
        inputs: Sequence[Any],
        stored: Iterable[BatchCut],
        capture: Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]],
    ) -> Callable[..., Any]:
        """Captures a graph, in parts if it is a training graph and they are chosen.

        Every rank calls this for the first training graph. It is run without a compiler: whole and in
        parts to time it, and again to compare outputs and gradients. Graphs of other batches are cut in
        its ranges, without a message. If they are not, because a batch is too small or the program is
        another one, ranks may run different exchanges: so once there are parts, ranks agree before each
        forward pass, and where they differ all run it without a compiler, whole.

        Args:
            module: of Dynamo.
            inputs: its example inputs.
            stored: on rank 0, how models were cut before, which is taken in place of timing.
            capture: returns what runs a graph, given it and its inputs.

        Raises:
            TensorifyScalarRestartAnalysis: Dynamo is to trace the graph again, which it then does.
            CommError: a rank died or the timeout passed.
        """
        self._marks.close()
        traces_sizes, self._traces_sizes = self._traces_sizes, False
        if self._is_whole or not torch.is_grad_enabled():
            return capture(module, inputs)
        if not list_exchanges(module.graph):
            self.sentence = (
                "the batch stays whole: all layers of experts are checkpointed, or none is there"
            )
            return capture(module, inputs)
        try:
            if not traces_sizes:
                if not self._program:
                    self._prepare(module, inputs, stored)
                self._traces_sizes = True
                self._marks.enter_context(mark_sizes(inputs))
                _trace_again()
            inputs = drop_unused_sizes(module, inputs)
            program = _digest(module)
            if self._program:
                parts = self._cut_later(module, inputs, program)
            else:
                parts = self._cut_first(module, inputs)
                self._program = program
        except ConfigError as error:
            self._is_whole = True
            self.cut = BatchCut(digest=self.cut.digest)
            self.sentence = f"the batch stays whole: {error}"
            if traces_sizes:
                # With numbers, as if nothing had been tried: a whole batch has one graph and one plan.
                _trace_again()
            return capture(module, inputs)
        fix_sizes(module)
        run = capture(parts or module, inputs)
        own = f"{'in parts' if parts else 'whole'} {program}"

        def run_with_all(*arguments: Any) -> Any:
            is_agreed = len({*share_texts(self._control, own)}) == 1
            return (run if is_agreed else module.forward)(*arguments)

        return run_with_all

    def _prepare(
        self, module: fx.GraphModule, inputs: Sequence[Any], stored: Iterable[BatchCut]
    ) -> None:
        """Looks for a stored cut of the first graph, and whether its exchanges take long enough.

        Raises:
            ConfigError: the batch stays whole, on all ranks; says why.
            CommError: a rank died or the timeout passed.
        """
        digest = digest_lines([_digest(module), *map(_shape, inputs)])
        digests = share_texts(self._control, digest)
        if len({*digests}) > 1:
            raise ConfigError(
                f"expected the same model and shapes on all ranks, got the graphs "
                f"{', '.join(other[:8] for other in digests)}; give all ranks batches of one shape in "
                f"the first step"
            )
        own = next((other for other in stored if self._is_for(other, digest)), None)
        text = share_text(self._control, json.dumps(asdict(own) if own else None))
        if json.loads(text) is not None:
            self.cut = BatchCut.from_values(json.loads(text) | {"digest": digest})
            if not self.cut.ranges:
                raise ConfigError(_AS_LOADED)
            return
        self.cut = BatchCut(digest=digest)
        if self._num_parts is not None:
            return
        costs = self._measure(module, None, inputs, [1])
        whole_s = sum(costs.time_s[1])
        sent_s = sum(
            seconds
            for seconds, kind in zip(costs.time_s[1], costs.kinds, strict=True)
            if kind == "all_to_all"
        )
        if sent_s < LEAST_GAIN * whole_s:
            raise ConfigError(
                f"all-to-alls take {format_s(sent_s)} of the forward pass' {format_s(whole_s)}, and parts "
                f"can hide no more"
            )

    def _cut_first(self, module: fx.GraphModule, inputs: Sequence[Any]) -> fx.GraphModule:
        """Chooses ranges with all ranks, cuts the first graph and checks it.

        Raises:
            ConfigError: the batch stays whole, on all ranks; says why.
            CommError: a rank died or the timeout passed.
        """
        axes = run_on_all(self._control, lambda: self._find_axes(module, inputs))
        gain = _AS_LOADED
        if not self.cut.ranges:
            chosen = self._choose(module, axes, inputs)
            if not chosen.ranges:
                raise ConfigError(chosen.reason)
            self.cut = replace(self.cut, ranges=chosen.ranges, extra_bytes=chosen.extra_bytes)
            gain = (
                f"its forward pass replays in {format_s(chosen.cut_s)} in place of "
                f"{format_s(chosen.whole_s)}, with what parts add to the backward pass"
            )
        parts = run_on_all(self._control, lambda: cut(module, axes, self.cut.ranges))
        position = run_on_all(
            self._control,
            lambda: find_difference(_run(module, inputs), _run(parts, inputs), NUM_ROUNDINGS),
        )
        states = share_texts(self._control, json.dumps([position, _digest(parts)]))
        positions = [json.loads(state)[0] for state in states]
        differing = [rank for rank, other in enumerate(positions) if other is not None]
        if differing or len({json.loads(state)[1] for state in states}) > 1:
            raise ConfigError(
                f"expected the same graph in parts on all ranks, and the whole batch's results, got others "
                f"on ranks {differing} (outputs or gradients {[positions[rank] for rank in differing]})"
            )
        numbers = ", ".join(str(num_parts) for *_, num_parts in self.cut.ranges)
        self.sentence = (
            f"the batch is cut, each range of operators into its parts ({numbers}): {gain}"
        )
        return parts

    def _cut_later(
        self, module: fx.GraphModule, inputs: Sequence[Any], program: str
    ) -> fx.GraphModule | None:
        """A graph of another batch in the first one's ranges, None if it cannot be cut."""
        num_parts = max(num_parts for *_, num_parts in self.cut.ranges)
        try:
            axes = find_batch_axes(module, inputs)
            if axes is not None and axes.size >= num_parts and program == self._program:
                return cut(module, axes, self.cut.ranges)
        except ConfigError:
            pass  # another program
        return None

    def _find_axes(self, module: fx.GraphModule, inputs: Sequence[Any]) -> BatchAxes:
        axes = find_batch_axes(module, inputs)
        size = 1 if axes is None else axes.size
        if axes is None or not self._list_numbers(size):
            raise ConfigError(
                f"expected a batch that divides into {self._num_parts or _NUMBERS[0]} parts, got {size} "
                f"sequences"
            )
        return axes

    def _list_numbers(self, size: int) -> list[int]:
        """Numbers of parts to try with a batch of some sequences."""
        numbers = _NUMBERS if self._num_parts is None else (self._num_parts,)
        return [number for number in numbers if size % number == 0]

    def _is_for(self, stored: BatchCut, digest: str) -> bool:
        """Whether a stored cut is one of this model, and of the number of parts asked for.

        A plan for which nothing was chosen is one of a whole batch.
        """
        if self._num_parts is None:
            return stored.digest in ("", digest)
        numbers = {num_parts for *_, num_parts in stored.ranges}
        return stored.digest == digest and numbers == {self._num_parts}

    def _choose(
        self, module: fx.GraphModule, axes: BatchAxes, inputs: Sequence[Any]
    ) -> ChosenRanges:
        """Ranges by the seconds of all ranks; rank 0 chooses."""
        costs = self._measure(module, axes, inputs, [1, *self._list_numbers(axes.size)])

        def choose() -> str | None:
            if self._group.rank:
                return None
            is_forced = self._num_parts is not None
            return json.dumps(
                asdict(choose_ranges(module.graph, axes, costs, may_stay_whole=not is_forced))
            )

        values = json.loads(share_text(self._control, run_on_all(self._control, choose)))
        chosen = ChosenRanges(**values | {"ranges": tuple(map(tuple, values["ranges"]))})
        if self._memory_bytes is not None and chosen.extra_bytes > self._memory_bytes:
            raise ConfigError(
                f"parts may take {format_bytes(chosen.extra_bytes)} more memory, and memory_bytes allows "
                f"{format_bytes(self._memory_bytes)}"
            )
        return chosen

    def _measure(
        self,
        module: fx.GraphModule,
        axes: BatchAxes | None,
        inputs: Sequence[Any],
        numbers: Sequence[int],
    ) -> PartCosts:
        """Costs of a graph's nodes, the same on all ranks."""
        own = run_on_all(
            self._control, lambda: time_parts(module, axes, inputs, self._group, numbers)
        )
        text = json.dumps([list(own.time_s.values()), own.copy_s, own.num_bytes])
        return merge_costs(
            [
                PartCosts(own.kinds, dict(zip(numbers, time_s, strict=True)), copy_s, num_bytes)
                for time_s, copy_s, num_bytes in map(json.loads, share_texts(self._control, text))
            ]
        )


def _trace_again() -> NoReturn:
    raise TensorifyScalarRestartAnalysis(restart_reason="lancet cuts the batch")


def _digest(module: fx.GraphModule) -> str:
    return digest_lines(node.format_node() or "" for node in module.graph.nodes)


def _shape(value: Any) -> str:
    return f"{value.dtype} {[*map(int, value.shape)]}" if isinstance(value, Tensor) else ""


def _run(module: fx.GraphModule, inputs: Sequence[Any]) -> list[Tensor]:
    """Outputs and gradients on this rank; the random state is as before."""
    # Copies, as hooks of divided models average the gradients of the parameters themselves.
    inputs = [
        value.detach().clone().requires_grad_(value.requires_grad)
        if isinstance(value, nn.Parameter)
        else int(value)
        if isinstance(value, torch.SymInt)
        else value
        for value in inputs
    ]
    with torch.random.fork_rng():
        outputs = [value for value in module.forward(*inputs) if isinstance(value, Tensor)]
        trained = [value for value in outputs if value.requires_grad]
        leaves = [v for v in inputs if isinstance(v, Tensor) and v.requires_grad]
        gradients: Sequence[Tensor | None] = ()
        if trained and leaves:
            gradients = torch.autograd.grad(
                trained, leaves, [torch.ones_like(v) for v in trained], allow_unused=True
            )
    results = [value for value in (*outputs, *gradients) if value is not None]
    return [getattr(value, "_local_tensor", value).detach() for value in results]
