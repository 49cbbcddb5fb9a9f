"""Draws measured and replayed steps in one Chrome trace, on one clock."""

from __future__ import annotations

import json
import os
from typing import Any

from qsync.diagnosis.diagnose import Diagnosis
from qsync.diagnosis.what_if import JobChange
from shared.files import write_atomically

__all__ = ["write_comparison"]

_US = 1e6


def write_comparison(
    diagnosis: Diagnosis, path: str | os.PathLike[str], change: JobChange | None = None
) -> None:
    """Writes the measured steps and their replay, for chrome://tracing and ui.perfetto.dev.

    Each rank is two processes, "measured" and "replayed". Times are in microseconds since the first
    rank's first step; waiting in a collective is drawn apart from its transfer. Category `critical`
    marks the replay's critical path; memory, where traced, is a counter.

    Args:
        diagnosis: of the traced job.
        path: file to write.
        change: what the replay assumes; nothing if None.

    Raises:
        OSError: the file cannot be written.
    """
    job, forecast = diagnosis.job, diagnosis.job.predict(change)
    origin_s = min(lane[0].start_s - lane[0].gap_s for lane in job.lanes)
    events: list[dict[str, Any]] = []

    def draw(process: int, row: int, name: str, start_s: float, end_s: float, kind: str) -> None:
        if end_s > start_s:
            events.append(
                {"ph": "X", "name": name, "cat": kind, "pid": process, "tid": row,
                 "ts": start_s * _US, "dur": (end_s - start_s) * _US}
            )  # fmt: skip

    for rank, lane in enumerate(job.lanes):
        measured = 2 * rank
        for process, word in ((measured, "measured"), (measured + 1, "replayed")):
            labels = ("process_name", f"rank {rank} {word}", 0), ("thread_name", "operators", 0)
            for key, name, row in (*labels, ("thread_name", "collectives", 1)):
                about = {"ph": "M", "name": key, "pid": process, "tid": row, "args": {"name": name}}
                events.append(about)
        for piece in lane:
            start_s = piece.start_s - origin_s
            draw(measured, 0, piece.name, start_s, start_s + piece.busy_s, "operator")
        for c in diagnosis.collectives:
            begin_s, joined_s = c.start_s[rank] - origin_s, c.transfer[0] - origin_s
            draw(measured, 1, f"wait for rank {c.last_rank}", begin_s, joined_s, "wait")
            draw(measured, 1, c.kind, joined_s, c.end_s[rank] - origin_s, "transfer")
        for sample in diagnosis.traces[rank].memory:
            time_s = diagnosis.clocks[rank].to_common(sample.time_s) - origin_s
            name, count = f"memory of {sample.device}", {"bytes": sample.allocated_bytes}
            counter = {"ph": "C", "name": name, "pid": measured, "ts": time_s * _US, "args": count}
            events.append(counter)
    graph, timeline = forecast.graph, forecast.timeline
    critical = {step.name for step in timeline.critical_path}
    starts_s, ends_s = timeline.start_s.tolist(), timeline.end_s.tolist()
    for i, piece in enumerate(graph.pieces):
        begin_s = min(starts_s[i] + piece.gap_s, ends_s[i])
        kind = "critical" if i in critical else "operator"
        draw(2 * int(graph.ranks[i]) + 1, 0, piece.name, begin_s, ends_s[i], kind)
    for i, exchange in enumerate(graph.exchanges):
        j, kind = len(graph.pieces) + i, "critical" if ("exchange", i) in critical else "transfer"
        for rank in range(len(job.lanes)):
            draw(2 * rank + 1, 1, exchange.kind, starts_s[j], ends_s[j], kind)
    write_atomically(path, json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
