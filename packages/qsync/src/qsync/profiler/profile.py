"""What planning needs to know of one rank: its operators, their seconds, casts and memory."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

import torch
from torch import nn

from qsync.planner.cost_mapper import CostMapper
from qsync.planner.graph import Graph, Op
from qsync.planner.memory import SavedTensor
from qsync.planner.ranks import RankCosts
from qsync.planner.replayer import RankSeconds
from qsync.precisions import HIGHEST, sort_precisions
from qsync.profiler.casts import CastFits, fit_casts
from qsync.profiler.gradients import LossFunction
from qsync.profiler.graph_tracing import gap_name, trace_model
from qsync.profiler.saved_tensors import record_saved_tensors
from qsync.profiler.step_timing import time_precisions

__all__ = ["RankProfile", "profile_model"]

# Copies of a trained parameter that a step has beside what backward needs: the master, its gradient
# and the two moments of Adam.
_PARAMETER_COPIES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class RankProfile:
    """Measurements of one rank.

    Attributes:
        device: what it computes on, in words.
        graph: the operators that a step runs, with the time between them as operators of its own.
        forward_s, backward_s: by operator and precision, seconds of the operator as it runs in the
            model, casts included. Other operators of the graph have "fp32" alone, or take no time.
        casts: fits of all casts.
        saved: what a float32 step keeps for its backward pass.
        parameter_bytes: parameters, gradients and optimizer state.
        limit_bytes: memory of the device; infinite if unknown.
        rest_s: seconds that sums of gradients take from computing, as copies into buckets and
            all-reduces on the same core do; 0 where one rank trains alone.
        notes: what a reader must know of how this was obtained.
    """

    device: str
    graph: Graph
    forward_s: Mapping[str, Mapping[str, float]]
    backward_s: Mapping[str, Mapping[str, float]]
    casts: CastFits
    saved: tuple[SavedTensor, ...]
    parameter_bytes: int
    limit_bytes: float = inf
    rest_s: float = 0.0
    notes: tuple[str, ...] = ()

    @property
    def float32(self) -> RankSeconds:
        """The parts of a float32 step."""
        forward_s, backward_s = (
            [table.get(op.name, {}).get(HIGHEST, 0.0) for op in self.graph.ops]
            for table in (self.forward_s, self.backward_s)
        )
        return RankSeconds(forward_s=forward_s, backward_s=backward_s)

    @property
    def step_s(self) -> float:
        """Seconds of a float32 step, without optimizer and all-reduce."""
        return self.float32.compute_s

    def costs(self) -> RankCosts:
        """Returns the costs as the planner takes them.

        An operator's seconds hold the casts at its borders, which the planner prices by itself; its
        kernel is what remains.
        """
        forward_s = {name: dict(row) for name, row in self.forward_s.items()}
        backward_s = {name: dict(row) for name, row in self.backward_s.items()}
        casts = CostMapper(self.graph, kernel_s=lambda *_: 0.0, cast_s=self._cast_s)
        for i in self.graph.linears:
            name = self.graph.ops[i].name
            for precision in forward_s[name]:
                casts.set(name, precision)
                for row, cast_s in (
                    (forward_s[name], casts.forward_s),
                    (backward_s[name], casts.backward_s),
                ):
                    # What an operator's own price cannot hold, its neighbours' casts take.
                    row[precision] = max(row[precision] - sum(cast_s), -cast_s[i])
                casts.undo()
        return RankCosts(
            kernel_s=lambda op, precision: _look_up(forward_s, op, precision),
            backward_kernel_s=lambda op, precision: _look_up(backward_s, op, precision),
            cast_s=self._cast_s,
            rest_s=self.rest_s,
            device=self.device,
            graph=self.graph,
            saved=self.saved,
            other_bytes=self.parameter_bytes,
            limit_bytes=self.limit_bytes,
        )

    def _cast_s(self, source: str, target: str, numel: int) -> float:
        return self.casts[source, target].time_s(numel)


def profile_model(
    model: nn.Module,
    batches: Sequence[Any],
    loss_fn: LossFunction,
    *,
    precisions: Sequence[str],
) -> RankProfile:
    """Measures a model's operators on this rank, in the steps that it will run.

    Args:
        model: model; it is left as it was.
        batches: training batches.
        loss_fn: returns the loss of (model, batch).
        precisions: names that a plan may use; float32 is measured in any case.

    Raises:
        ConfigError: a precision is unknown.
        DataError: no operator ran.
    """
    allowed = sort_precisions([*precisions, HIGHEST])
    device = _find_device(model)
    traced = trace_model(model, batches[0], loss_fn)
    steps = time_precisions(model, batches, loss_fn, allowed)
    forward_s: dict[str, dict[str, float]] = {}
    backward_s: dict[str, dict[str, float]] = {}
    for name in traced.names:
        forward_s[name] = {each: steps[each].forward_s.get(name, 0.0) for each in allowed}
        backward_s[name] = {each: steps[each].backward_s.get(name, 0.0) for each in allowed}
    for name in (*traced.names, ""):
        float32 = steps[HIGHEST]
        forward_s[gap_name(name)] = {HIGHEST: float32.forward_gap_s.get(name, 0.0)}
        backward_s[gap_name(name)] = {HIGHEST: float32.backward_gap_s.get(name, 0.0)}
    notes = ()
    if traced.reason:
        notes = (f"operators were found by modules, since FX failed ({traced.reason})",)
    return RankProfile(
        device=_describe(device),
        graph=traced.graph,
        forward_s=forward_s,
        backward_s=backward_s,
        casts=fit_casts(allowed, device),
        saved=record_saved_tensors(model, batches[0], loss_fn),
        parameter_bytes=sum(
            each.nbytes * (_PARAMETER_COPIES if each.requires_grad else 1)
            for each in model.parameters()
        ),
        limit_bytes=_find_memory(device),
        notes=notes,
    )


def _find_device(model: nn.Module) -> torch.device:
    """Returns the device of a model's parameters, the CPU if it has none."""
    parameter = next(model.parameters(), None)
    return torch.device("cpu") if parameter is None else parameter.device


def _look_up(table: Mapping[str, Mapping[str, float]], op: Op, precision: str) -> float:
    row = table.get(op.name, {})
    return row.get(precision, row.get(HIGHEST, 0.0))


def _find_memory(device: torch.device) -> float:
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    return inf


def _describe(device: torch.device) -> str:
    """The processor's name; with a CPU's, the instruction set that torch uses."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    except OSError:
        names = []
    name = names[0] if names else platform.processor() or platform.machine()
    return f"{name}, {torch.backends.cpu.get_cpu_capability()}"
