"""Pictures and Chrome traces of steps: what ranks do when, planned above measured."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from shared.files import write_atomically
from shared.training.pictures import new_picture, save_picture
from shared.units import format_s

if TYPE_CHECKING:
    from diffusionpipe.runtime.records import RunReport
    from shared.topology import Timeline

__all__ = ["TimedBar", "draw_steps", "list_measured_bars", "list_planned_bars", "write_trace"]

# Colour of each kind of work, and its name in the legend.
_KINDS = {
    "forward": ("#0b7285", "forward"),
    "estimate": ("#66d9e8", "estimate"),
    "backward": ("#364fc7", "backward"),
    "encode": ("#f08c00", "frozen part"),
    "step": ("#868e96", "optimizer"),
}
# Names that the runtime and the simulator have for the same kinds.
_SAME = {"update": "step", "frozen": "encode"}


class TimedBar(NamedTuple):
    """What a rank does for some time.

    Attributes:
        kind: "forward", "estimate", "backward", "encode" or "step".
        start_s, end_s: seconds from the step's begin.
        label: stage and micro-batch, or component.
    """

    kind: str
    start_s: float
    end_s: float
    label: str


def list_planned_bars(timeline: Timeline, queues: Sequence[str]) -> list[list[TimedBar]]:
    """Reads bars off a replayed or simulated step.

    Args:
        timeline: of the step.
        queues: names of the devices, "rank 0" or "device 0" and so on.

    Returns:
        Bars of each device.
    """
    bars: list[list[TimedBar]] = [[] for _ in queues]
    number = {queue: device for device, queue in enumerate(queues)}
    for i, operation in enumerate(timeline.graph.operations):
        device = number.get(operation.queue) if isinstance(operation.queue, str) else None
        if device is None or not isinstance(operation.name, tuple):
            continue
        # A replayed plan's names begin with an action, a simulated step's with its kind.
        head = operation.name[0]
        kind, first, second, *rest = (
            *(head if isinstance(head, tuple) else operation.name),
            "",
            "",
        )
        label = f"{first} {second}" if kind in ("forward", "backward", "estimate") else rest[0]
        start_s, end_s = float(timeline.start_s[i]), float(timeline.end_s[i])
        bars[device].append(TimedBar(_SAME.get(kind, kind), start_s, end_s, str(label)))
    return bars


def list_measured_bars(report: RunReport) -> list[list[TimedBar]]:
    """Reads bars off the record of the last step that was run.

    Args:
        report: what `Engine.report` returned.

    Returns:
        Bars of each rank, from the first rank's begin of the step.
    """
    # Clocks of two hosts differ, but the ranks' agreement ends on all at once. Then weights are updated.
    last = [steps[-1] for steps in report.steps]
    agreed_s = [next(a.start_s for a in step.actions if a.kind == "update") for step in last]
    longest_s = max(end_s - step.start_s for end_s, step in zip(agreed_s, last, strict=True))
    return [
        [
            TimedBar(
                _SAME.get(action.kind, action.kind),
                action.start_s - end_s + longest_s,
                action.end_s - end_s + longest_s,
                action.name or f"{action.stage} {action.micro_batch}",
            )
            for action in step.actions
            if action.kind != "wait"
        ]
        for end_s, step in zip(agreed_s, last, strict=True)
    ]


def draw_steps(steps: Mapping[str, Sequence[Sequence[TimedBar]]], path: Path, title: str) -> None:
    """Draws steps one above the other, on one scale of time.

    Args:
        steps: bars by rank of each step, by what is written above it.
        path: SVG file to write.
        title: of the picture.
    """
    heights = [len(bars) for bars in steps.values()]
    figure = new_picture(1.3 + 0.45 * len(heights) + 0.28 * sum(heights))
    panels = figure.subplots(
        len(heights), 1, sharex=True, squeeze=False, gridspec_kw={"height_ratios": heights}
    )[:, 0]
    longest_s = max(
        (bar.end_s for bars in steps.values() for own in bars for bar in own), default=0
    )
    scale = 1e3 if longest_s < 1 else 1.0
    shown: dict[str, Any] = {}
    for axes, (name, bars) in zip(panels, steps.items(), strict=True):
        for rank, own in enumerate(bars):
            for kind, (color, label) in _KINDS.items():
                spans = [
                    (bar.start_s * scale, (bar.end_s - bar.start_s) * scale)
                    for bar in own
                    if bar.kind == kind
                ]
                if spans:
                    drawn = axes.broken_barh(
                        spans,
                        (rank - 0.4, 0.8),
                        facecolors=color,
                        edgecolors="white",
                        linewidth=0.4,
                    )
                    shown.setdefault(label, drawn)
        end_s = max((bar.end_s for own in bars for bar in own), default=0.0)
        axes.set_title(f"{name}: {format_s(end_s)}", loc="left")
        axes.set_yticks(range(len(bars)), [f"rank {rank}" for rank in range(len(bars))])
        axes.set_ylim(len(bars) - 0.5, -0.5)
        axes.spines[["top", "right"]].set_visible(False)
    panels[-1].set_xlabel("milliseconds" if scale > 1 else "seconds")
    figure.legend(
        list(shown.values()), list(shown), loc="outside lower center", ncols=3, frameon=False
    )
    save_picture(figure, path, title)


def write_trace(steps: Mapping[str, Sequence[Sequence[TimedBar]]], path: Path) -> None:
    """Writes steps as a Chrome trace: a process for each, a thread for each rank.

    Args:
        steps: bars by rank of each step, by the process's name.
        path: JSON file to write.
    """
    events: list[dict[str, Any]] = []
    for process, (name, bars) in enumerate(steps.items()):
        about = {"name": "process_name", "ph": "M", "pid": process, "args": {"name": name}}
        events.append(about)
        for rank, own in enumerate(bars):
            events.append(
                {
                    "name": "thread_name", "ph": "M", "pid": process, "tid": rank,
                    "args": {"name": f"rank {rank}"},
                }
            )  # fmt: skip
            events += [
                {
                    "name": f"{bar.kind} {bar.label}", "cat": bar.kind, "ph": "X", "pid": process,
                    "tid": rank, "ts": bar.start_s * 1e6, "dur": (bar.end_s - bar.start_s) * 1e6,
                }
                for bar in own
            ]  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
