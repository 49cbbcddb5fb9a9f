"""Report of a pipeline's run: stage durations, period against the ideal, staleness, timeline."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from mspipe.planner import STAGES, Plan, plan
from mspipe.registry import MODES
from shared.files import write_atomically

__all__ = ["Report", "Span"]


@dataclass(frozen=True, slots=True)
class Span:
    """A stage of one iteration: its start and end in seconds from the start of the run."""

    stage: str
    iteration: int
    begin_s: float
    end_s: float


@dataclass(kw_only=True)
class Report:
    """Figures of one run, updated while it runs.

    Attributes:
        mode: mode of the pipeline.
        spans: start and end of each stage that ran.
        waits: seconds that training waited, by reason.
        staleness: for each iteration 1 if its fetch missed no write of the rows it read, else 1
            plus the number of iterations whose writes were not in the store at the fetch.
        num_rows_read: rows read from the store.
        num_rows_forwarded: rows taken from the ring of written rows instead.
        num_rows_written: rows written to the store.
        num_updates_dropped: rows written that overwrote a write which their state had missed.
        read_bytes, written_bytes: bytes read from and written to the store, or its cache.
        ring_bytes: largest size of the ring of written rows.
        num_mixed: stale rows that were mixed with those of similar nodes.
        weight: latest weight of a stale row's own state in the mix; None if none was mixed.
    """

    mode: str
    spans: list[Span] = field(default_factory=list)
    waits: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    staleness: list[int] = field(default_factory=list)
    num_rows_read: int = 0
    num_rows_forwarded: int = 0
    num_rows_written: int = 0
    num_updates_dropped: int = 0
    read_bytes: int = 0
    written_bytes: int = 0
    ring_bytes: int = 0
    num_mixed: int = 0
    weight: float | None = None

    def seconds(self, stage: str) -> list[float]:
        """Durations of a stage in seconds, by iteration."""
        return [span.end_s - span.begin_s for span in self.spans if span.stage == stage]

    @property
    def num_iterations(self) -> int:
        """Number of iterations whose memory was fetched."""
        return len(self.staleness)

    @property
    def stage_s(self) -> tuple[float, ...]:
        """Median durations of the stages in seconds, in the order of `STAGES`."""
        return tuple(median(self.seconds(stage) or [0.0]) for stage in STAGES)

    @property
    def plan(self) -> Plan:
        """Plan for the median stage durations: ideal period and the staleness it needs."""
        return plan(self.stage_s)

    @property
    def elapsed_s(self) -> float:
        """Seconds from the start of the first stage to the end of the last."""
        if not self.spans:
            return 0.0
        return max(s.end_s for s in self.spans) - min(s.begin_s for s in self.spans)

    @property
    def warm_s(self) -> float:
        """Seconds from the end of the first iteration, whose calls compile kernels, to the last's."""
        ends = [span.end_s for span in self.spans]
        first = min((span.iteration for span in self.spans), default=0)
        return max(ends, default=0.0) - max(
            (span.end_s for span in self.spans if span.iteration == first), default=0.0
        )

    @property
    def period_s(self) -> float:
        """Mean seconds between two ends of training, over the second half of the iterations."""
        ends = [span.end_s for span in self.spans if span.stage == "train"]
        first = len(ends) // 2
        return (ends[-1] - ends[first]) / (len(ends) - 1 - first) if len(ends) - 1 > first else 0.0

    @property
    def stall_share(self) -> float:
        """Share of the time from the first training to the end of the last that training waited."""
        trained = [span for span in self.spans if span.stage == "train"]
        if not trained:
            return 0.0
        whole = trained[-1].end_s - trained[0].begin_s
        return max(0.0, 1 - sum(s.end_s - s.begin_s for s in trained) / whole) if whole else 0.0

    @property
    def histogram(self) -> dict[int, int]:
        """Number of iterations by staleness."""
        return dict(sorted(Counter(self.staleness).items()))

    @property
    def dropped_share(self) -> float:
        """Share of the rows written that overwrote a write which their state had missed."""
        return self.num_updates_dropped / self.num_rows_written if self.num_rows_written else 0.0

    def __str__(self) -> str:
        stages = ", ".join(
            f"{name} {1e3 * s:.1f}" for name, s in zip(STAGES, self.stage_s, strict=True)
        )
        ideal_s, rows = self.plan.ideal_period, self.num_rows_read + self.num_rows_forwarded
        lines = [
            f"{self.mode}: {self.num_iterations} iterations in {self.elapsed_s:.2f} s",
            f"stages, median ms: {stages}",
            (
                f"period {1e3 * self.period_s:.1f} ms, ideal {1e3 * ideal_s:.1f} ms; training waited "
                f"{100 * self.stall_share:.1f} %"
            ),
            (
                f"rows: {rows:,} read, {self.num_rows_forwarded:,} of them forwarded; "
                f"{self.num_rows_written:,} written; ring {self.ring_bytes / 1e6:.1f} MB at most"
            ),
            f"store: {self.read_bytes / 1e6:.1f} MB in, {self.written_bytes / 1e6:.1f} MB out",
        ]
        if MODES.get(self.mode).is_stale:
            told = ", ".join(f"{k}: {n}" for k, n in self.histogram.items())
            lines.append(
                f"staleness {{{told}}}, {100 * self.dropped_share:.1f} % of updates dropped"
            )
            if self.weight is not None:
                lines.append(f"{self.num_mixed:,} stale rows mixed, own weight {self.weight:.2f}")
        if self.waits:
            told = ", ".join(f"{why} {s:.2f} s" for why, s in self.waits.items())
            lines.append(f"waits of training: {told}")
        return "\n".join(lines)

    def trace(self, path: str | Path) -> None:
        """Writes the spans in the Trace Event Format, for chrome://tracing and ui.perfetto.dev."""
        events: list[dict] = [
            {"name": key, "ph": "M", "pid": 0, "tid": tid, "args": about}
            for tid, name in enumerate(STAGES)
            for key, about in (
                ("thread_name", {"name": name}),
                ("thread_sort_index", {"sort_index": tid}),
            )
        ]
        events += [
            {
                "name": f"{span.stage} {span.iteration}",
                "cat": span.stage,
                "ph": "X",
                "pid": 0,
                "tid": STAGES.index(span.stage),
                "ts": 1e6 * span.begin_s,
                "dur": 1e6 * (span.end_s - span.begin_s),
            }
            for span in self.spans
        ]
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
