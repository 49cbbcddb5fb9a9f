"""Draws measured and replayed steps in one Chrome trace, on one clock."""

from __future__ import annotations

import json
import os
from typing import Any, cast

from qsync.diagnosis.diagnose import Diagnosis
from qsync.diagnosis.what_if import JobChange
from shared.files import write_atomically

__all__ = ["compare_in_chrome", "write_comparison"]

_ROWS = ("operators", "collectives")


def compare_in_chrome(diagnosis: Diagnosis, change: JobChange | None = None) -> dict[str, Any]:
    """The measured steps and their replay, in the Trace Event Format.

    Each rank is two processes, "measured" and "replayed". Times are in microseconds since the first
    rank's first step; waiting in a collective is drawn apart from its transfer. Category `critical`
    marks the replay's critical path; memory, where traced, is a counter.

    Args:
        diagnosis: of the traced job.
        change: what the replay assumes; nothing if None.
    """
    job, forecast = diagnosis.job, diagnosis.job.predict(change)
    origin_s = min(lane[0].start_s - lane[0].gap_s for lane in job.lanes)
    events: list[dict[str, Any]] = []

    def draw(process: int, row: int, name: str, span_s: tuple[float, float], category: str) -> None:
        start_s, end_s = span_s
        events.append(
            {"ph": "X", "name": name, "cat": category, "pid": process, "tid": row,
             "ts": start_s * 1e6, "dur": (end_s - start_s) * 1e6}
        )  # fmt: skip

    for rank, lane in enumerate(job.lanes):
        for process, word in ((2 * rank, "measured"), (2 * rank + 1, "replayed")):
            _name(events, "process_name", f"rank {rank} {word}", process)
            for row, name in enumerate(_ROWS):
                _name(events, "thread_name", name, process, row)
        for piece in lane:
            if piece.busy_s:
                span_s = piece.start_s - origin_s, piece.end_s - origin_s
                draw(2 * rank, 0, piece.name, span_s, "operator")
        for c in diagnosis.collectives:
            begin_s, joined_s = c.start_s[rank] - origin_s, c.transfer[0] - origin_s
            if joined_s > begin_s:
                draw(2 * rank, 1, f"wait for rank {c.last_rank}", (begin_s, joined_s), "wait")
            end_s = max(c.end_s[rank] - origin_s, joined_s)
            draw(2 * rank, 1, c.kind, (joined_s, end_s), "transfer")
        for sample in diagnosis.traces[rank].memory:
            shift_s = diagnosis.to_common(rank, sample.time_s) - origin_s
            name = f"memory of {sample.device}"
            events.append({"ph": "C", "name": name, "pid": 2 * rank, "ts": shift_s * 1e6,
                           "args": {"bytes": sample.allocated_bytes}})  # fmt: skip
    critical = {step.name for step in forecast.timeline.critical_path}
    graph, timeline = forecast.graph, forecast.timeline
    for operation, start_s, end_s in zip(
        graph.operations, timeline.start_s.tolist(), timeline.end_s.tolist(), strict=True
    ):
        category = "critical" if operation.name in critical else "operator"
        if isinstance(operation.name, int):
            busy_s = start_s + min(graph.gap_s[operation.name], end_s - start_s), end_s
            process = 2 * int(graph.ranks[operation.name]) + 1
            draw(process, 0, graph.names[operation.name], busy_s, category)
            continue
        for rank in range(job.num_ranks):
            kind = graph.exchanges[cast("tuple[str, int]", operation.name)[1]].kind
            draw(2 * rank + 1, 1, kind, (start_s, end_s), category)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def write_comparison(
    diagnosis: Diagnosis, path: str | os.PathLike[str], change: JobChange | None = None
) -> None:
    """Writes `compare_in_chrome` to a file, for chrome://tracing and ui.perfetto.dev.

    Raises:
        OSError: the file cannot be written.
    """
    write_atomically(path, json.dumps(compare_in_chrome(diagnosis, change)))


def _name(events: list[dict[str, Any]], key: str, name: str, process: int, row: int = 0) -> None:
    events.append({"ph": "M", "name": key, "pid": process, "tid": row, "args": {"name": name}})
