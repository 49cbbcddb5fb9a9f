"""Sorts the events of a Chrome trace into steps, operators, collectives and memory.

Collectives of gloo are annotations on gloo's own threads ("gloo:all_reduce"), which begin when a
thread takes up the work and end when it is done. Those of NCCL are GPU kernels
("ncclDevKernel_AllReduce_..."); that form follows its documentation and is untested on a GPU. The
compute lane of a rank holds its GPU kernels where the trace has any, else its outermost operators
on CPU threads.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from itertools import pairwise
from typing import Any, NamedTuple

__all__ = ["LOADER", "MemorySample", "TraceSpan", "collect_fields"]

LOADER = "data loader"

_COLLECTIVES = (
    "allreduce", "allgather", "reducescatter", "alltoall", "barrier", "broadcast", "gather",
    "scatter", "reduce", "send", "recv",
)  # fmt: skip
_CPU_BACKENDS = ("gloo:", "ucc:", "mpi:")
_GPU_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
# Bytes of an element by the names that PyTorch's recorders give to types.
_ELEMENT_BYTES = {
    "double": 8, "long": 8, "long int": 8, "float": 4, "int": 4, "c10::half": 2, "half": 2,
    "c10::bfloat16": 2, "bfloat16": 2, "unsigned char": 1, "signed char": 1, "char": 1, "byte": 1,
    "bool": 1,
}  # fmt: skip
_STEP = re.compile(r"ProfilerStep#(\d+)")
_AUTOGRAD = "autograd::engine::evaluate_function: "


class TraceSpan(NamedTuple):
    """An interval of a rank.

    Attributes:
        name: operator, kernel, or kind of collective ("allreduce").
        start_s, end_s: on the rank's clock.
        num_bytes: bytes of its first inputs; None if the trace does not tell.
    """

    name: str
    start_s: float
    end_s: float
    num_bytes: int | None = None


class MemorySample(NamedTuple):
    """Bytes allocated on a device ("cpu", "cuda:0") after an allocation or release."""

    time_s: float
    device: str
    allocated_bytes: int


def collect_fields(events: list[dict[str, Any]], shift_s: float) -> dict[str, Any]:
    """Sorts a trace's events into the fields of `RankTrace`."""
    steps, forwards, loads, operators, kernels = [], [], [], [], []
    collectives: list[TraceSpan] = []
    gpu_steps, enqueued, memory = [], [], []
    for event in events:
        name, category = str(event.get("name", "")), event.get("cat", "")
        if event.get("ph") == "i" and name == "[memory]":
            memory.append(_memory_sample(event, shift_s))
        if event.get("ph") != "X":
            continue
        start_s = shift_s + float(event["ts"]) * 1e-6
        span = TraceSpan(name, start_s, start_s + float(event["dur"]) * 1e-6)
        arguments = event.get("args", {})
        if category in ("user_annotation", "gpu_user_annotation"):
            if match := _STEP.fullmatch(name):
                of_device = gpu_steps if category.startswith("gpu") else steps
                of_device.append(span._replace(name=match[1]))
            elif category.startswith("gpu"):
                continue
            elif name.startswith(_CPU_BACKENDS):
                collectives.append(_collective(span, name.partition(":")[2], arguments))
            elif name == "DistributedDataParallel.forward":
                forwards.append(span)
            elif name.startswith("enumerate(DataLoader)"):
                loads.append(span._replace(name=LOADER))
        elif category in _GPU_WORK:
            if name.lower().startswith("nccl"):
                kind = arguments.get("Collective name") or name.split("_")[1]
                collectives.append(_collective(span, kind, arguments))
            else:
                kernels.append(span)
        elif category == "cpu_op":
            if name.startswith("c10d::"):
                enqueued.append(_collective(span, name[6:], {}))
            elif name != "record_param_comms":
                num_bytes = _input_bytes(arguments)
                operators.append(span._replace(name=name.removeprefix(_AUTOGRAD))._replace(
                    num_bytes=num_bytes))  # fmt: skip
    collectives.sort(key=lambda span: span.start_s)
    lane = _flatten([*(kernels or operators), *loads])
    return {
        "steps": _steps(gpu_steps if kernels and gpu_steps else steps, forwards, lane, collectives),
        "lane": tuple(lane),
        "collectives": tuple(collectives),
        "enqueued_s": tuple(_enqueue_times(collectives, [] if kernels else enqueued)),
        "memory": tuple(sorted(memory)),
    }


def _collective(span: TraceSpan, kind: str, arguments: dict[str, Any]) -> TraceSpan:
    letters = re.sub("[^a-z]", "", kind.lower())
    name = next((each for each in _COLLECTIVES if each in letters), letters)
    num_bytes = _input_bytes(arguments)
    if "In msg nelems" in arguments:
        element_bytes = _ELEMENT_BYTES.get(str(arguments.get("dtype", "")).lower(), 4)
        num_bytes = int(arguments["In msg nelems"]) * element_bytes
    return span._replace(name=name, num_bytes=num_bytes)


def _input_bytes(arguments: dict[str, Any]) -> int | None:
    """Bytes of the first input, a tensor or a list of tensors; None without recorded shapes."""
    shapes = arguments.get("Input Dims") or []
    if not shapes or not shapes[0]:
        return None
    types = arguments.get("Input type") or ["float"]
    return _count(shapes[0]) * _ELEMENT_BYTES.get(str(types[0]).lower(), 4)


def _count(shape: list[Any]) -> int:
    if shape and isinstance(shape[0], list):
        return sum(map(_count, shape))
    return math.prod(map(int, shape))


def _memory_sample(event: dict[str, Any], shift_s: float) -> MemorySample:
    about = event["args"]
    index = int(about.get("Device Id", -1))
    # Device type 0 is the CPU in PyTorch's numbering.
    device = "cpu" if int(about.get("Device Type", 0)) == 0 else f"cuda:{max(index, 0)}"
    return MemorySample(shift_s + float(event["ts"]) * 1e-6, device, int(about["Total Allocated"]))


def _flatten(spans: Iterable[TraceSpan]) -> list[TraceSpan]:
    """Outermost spans in order; one that begins within another keeps only what sticks out."""
    lane: list[TraceSpan] = []
    end_s = float("-inf")
    for span in sorted(spans, key=lambda span: (span.start_s, -span.end_s)):
        if span.end_s > end_s:
            lane.append(span._replace(start_s=max(span.start_s, end_s)))
            end_s = span.end_s
    return lane


def _steps(
    marks: list[TraceSpan],
    forwards: list[TraceSpan],
    lane: list[TraceSpan],
    collectives: list[TraceSpan],
) -> tuple[TraceSpan, ...]:
    """Steps by the profiler's marks, else from one DDP forward to the next, else one step."""
    if marks:
        return tuple(sorted(marks, key=lambda span: span.start_s))
    spans = [*lane, *collectives]
    if not spans:
        return ()
    first_s, last_s = min(s.start_s for s in spans), max(s.end_s for s in spans)
    edges = sorted(span.start_s for span in forwards)
    # What follows the last forward pass is no whole step.
    edges = edges if len(edges) > 1 else [first_s, last_s]
    return tuple(TraceSpan(str(number), *bounds) for number, bounds in enumerate(pairwise(edges)))


def _enqueue_times(collectives: list[TraceSpan], enqueued: list[TraceSpan]) -> list[float]:
    """When each collective was enqueued: its call's start if calls match, else its own start."""
    times = [span.start_s for span in collectives]
    for kind in {span.name for span in collectives}:
        positions = [i for i, span in enumerate(collectives) if span.name == kind]
        calls = sorted(span.start_s for span in enqueued if span.name == kind)
        if len(calls) == len(positions):
            for i, call_s in zip(positions, calls, strict=True):
                times[i] = min(call_s, times[i])
    return times
