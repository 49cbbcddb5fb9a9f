"""Reports of a save's or load's spans: seconds by stage, a heat table, a trace for chrome://tracing.

Spans of one stage on one rank may overlap (several threads write); its seconds are those in which
at least one of them ran.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bytecheckpoint.ranks.trace import Span
from shared.errors import DataError
from shared.units import format_s

__all__ = ["STAGES", "StageTimes", "draw_heat", "make_chrome_trace", "parse_spans", "sum_stages"]

STAGES = (
    *("extract", "stage", "agree", "plan", "checksum", "write", "sync", "commit"),
    *("open", "read", "exchange", "copy"),
)

# More rows than this are drawn as the slowest rank of several.
_MAX_ROWS = 40


class StageTimes(NamedTuple):
    """One stage on all ranks.

    Attributes:
        stage: its name.
        seconds: by rank, in ascending order of `ranks`.
        ranks: which ranks have spans at all.
        num_bytes: moved by all ranks together.
    """

    stage: str
    seconds: np.ndarray
    ranks: np.ndarray
    num_bytes: int

    @property
    def slowest(self) -> int:
        """The rank that spent most seconds."""
        return int(self.ranks[self.seconds.argmax()])


def parse_spans(rows: Any) -> list[Span]:
    """Spans as a checkpoint stores them: [stage, rank, start_s, seconds, num_bytes] each.

    Raises:
        DataError: if they are not.
    """
    if not isinstance(rows, list):
        raise DataError(f"expected a list of spans, got {rows!r:.80}")
    spans = []
    for row in rows:
        match row:
            case [str(stage), int(rank), int() | float() as start, int() | float() as took, int(n)]:
                if not (math.isfinite(start) and math.isfinite(took) and took >= 0 <= rank):
                    raise DataError(f"a span cannot have the numbers {row!r:.80}")
                spans.append(Span(stage, rank, float(start), float(took), n))
            case _:
                raise DataError(f"expected [stage, rank, start_s, seconds, num_bytes], got {row!r}")
    return spans


def sum_stages(spans: Sequence[Span]) -> list[StageTimes]:
    """Seconds of each stage on each rank, stages in the order of the work."""
    ranks = sorted({span.rank for span in spans})
    row = {rank: at for at, rank in enumerate(ranks)}
    groups: dict[tuple[str, int], list[Span]] = {}
    for span in spans:
        groups.setdefault((span.stage, span.rank), []).append(span)
    found = []
    for stage in sorted({span.stage for span in spans}, key=_order_stage):
        seconds, num_bytes = np.zeros(len(ranks)), 0
        for rank in ranks:
            mine = groups.get((stage, rank), [])
            seconds[row[rank]] = _measure_covered_s(mine)
            num_bytes += sum(span.num_bytes for span in mine)
        found.append(StageTimes(stage, seconds, np.array(ranks), num_bytes))
    return found


def make_chrome_trace(spans: Iterable[Span]) -> dict[str, Any]:
    """The spans in the Trace Event Format, which chrome://tracing and ui.perfetto.dev open.

    Ranks are its processes and stages its threads; spans of a stage that overlap lie in several
    threads, since events of one thread must not.
    """
    events: list[dict[str, Any]] = []
    lanes: dict[tuple[int, str], list[float]] = {}
    for span in sorted(spans, key=lambda span: span.start_s):
        free_at = lanes.setdefault((span.rank, span.stage), [])
        lane = next((at for at, end in enumerate(free_at) if end <= span.start_s), len(free_at))
        free_at[lane : lane + 1] = [span.start_s + span.seconds]
        details: dict[str, float] = {"bytes": span.num_bytes}
        if span.num_bytes and span.seconds:
            details["GB/s"] = round(span.num_bytes / span.seconds / 1e9, 3)
        event = {
            "name": span.stage,
            "ph": "X",
            "pid": span.rank,
            "tid": _number_thread(span.stage, lane),
            "ts": span.start_s * 1e6,
            "dur": span.seconds * 1e6,
            "args": details,
        }
        events.append(event)
    for rank in sorted({rank for rank, _ in lanes}):
        names = {
            "process_name": {"name": f"rank {rank}"},
            "process_sort_index": {"sort_index": rank},
        }
        events += [{"name": k, "ph": "M", "pid": rank, "args": v} for k, v in names.items()]
    for (rank, stage), free_at in lanes.items():
        for lane in range(len(free_at)):
            label = f"{stage} {lane + 1}" if len(free_at) > 1 else stage
            tid = _number_thread(stage, lane)
            about = {"name": "thread_name", "ph": "M", "pid": rank, "tid": tid}
            events.append(about | {"args": {"name": label}})
            order = {"name": "thread_sort_index", "ph": "M", "pid": rank, "tid": tid}
            events.append(order | {"args": {"sort_index": tid}})
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def draw_heat(spans: Sequence[Span], title: str, path: Path) -> None:
    """Writes an SVG: ranks down, stages across, seconds as colour.

    Up to 40 ranks have a row each; of more, each row is the slowest of several. The last line names
    each stage's slowest rank, so that one straggler among a thousand is found.

    Args:
        spans: of all ranks.
        title: what was traced.
        path: the file.

    Raises:
        DataError: if there are no spans.
    """
    # Imported here: a text report needs none of it.
    from matplotlib.figure import Figure

    times = sum_stages(spans)
    if not times:
        raise DataError("there are no spans to draw; the checkpoint was saved without a trace")
    ranks = times[0].ranks
    per_row = -(-len(ranks) // _MAX_ROWS)
    starts = np.arange(0, len(ranks), per_row)
    cells = np.stack([np.maximum.reduceat(t.seconds, starts) for t in times], axis=1)
    num_rows, num_stages = cells.shape

    labels = [_format_row_label(ranks[s : s + per_row].tolist()) for s in starts.tolist()]

    figure = Figure(figsize=(2.2 + 1.15 * num_stages, 2.0 + 0.24 * num_rows), layout="constrained")
    axes = figure.add_subplot()
    top = max(float(cells.max()), 1e-9)
    image = axes.imshow(cells, cmap="YlOrRd", vmin=0, vmax=top, aspect="auto")
    for (at, stage), seconds in np.ndenumerate(cells):
        if seconds > 0:
            colour = "white" if seconds > 0.6 * top else "black"
            axes.text(
                stage, at, format_s(seconds), ha="center", va="center", fontsize=7, color=colour
            )
    axes.set_yticks(range(num_rows), labels, fontsize=7)
    axes.set_xticks(range(num_stages), [_format_footer(t) for t in times], fontsize=8)
    above = axes.secondary_xaxis("top")
    above.set_xticks(range(num_stages), [t.stage for t in times], fontsize=9, fontweight="bold")
    for axis in (axes, above):
        axis.tick_params(length=0)
        axis.spines[:].set_visible(False)
    axes.set_xticks(np.arange(num_stages - 1) + 0.5, minor=True)
    axes.set_yticks(np.arange(num_rows - 1) + 0.5, minor=True)
    axes.grid(which="minor", color="white", linewidth=1)
    axes.tick_params(which="minor", length=0)
    what = "seconds of a rank" if per_row == 1 else f"seconds of the slowest of {per_row} ranks"
    bar = figure.colorbar(image, ax=axes, label=what, pad=0.02, aspect=max(12, num_rows))
    bar.outline.set_visible(False)
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, format="svg", metadata={"Date": None})


def _order_stage(stage: str) -> tuple[int, str]:
    return (STAGES.index(stage) if stage in STAGES else len(STAGES), stage)


def _number_thread(stage: str, lane: int) -> int:
    return 100 * _order_stage(stage)[0] + lane + 1


def _measure_covered_s(spans: Iterable[Span]) -> float:
    covered, end = 0.0, -math.inf
    for span in sorted(spans, key=lambda span: span.start_s):
        stop = span.start_s + span.seconds
        covered += max(0.0, stop - max(end, span.start_s))
        end = max(end, stop)
    return covered


def _format_row_label(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"{ranks[0]}-{ranks[-1]}"


def _format_footer(times: StageTimes) -> str:
    typical = format_s(float(np.median(times.seconds)))
    return f"median {typical}\nmax {format_s(float(times.seconds.max()))}\non rank {times.slowest}"
