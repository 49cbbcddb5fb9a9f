"""Timeline figure of runs: the stages of a few iterations, one run above the other."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from mspipe.pipeline.report import Report
from mspipe.planner import STAGES
from shared.training.pictures import new_picture, save_picture

__all__ = ["draw"]

# Okabe and Ito's palette, which is safe for colour-blind readers.
_COLOURS = dict(zip(STAGES, ["#56B4E9", "#999999", "#0072B2", "#D55E00", "#009E73"], strict=True))
_LANES = {"sample": 3, "features": 2, "memory": 2, "train": 1, "write": 0}
_NAMES = ["write back", "train", "fetch", "sample"]


def draw(reports: Mapping[str, Report], path: Path, title: str, num_iterations: int = 6) -> None:
    """Draws each run from its middle on, for the same length of time.

    Args:
        reports: reports of the runs, by the title of each one's row.
        path: SVG file to write.
        title: title of the figure.
        num_iterations: length of the time shown, in iterations of the slowest run.
    """
    figure = new_picture(0.9 + 1.5 * len(reports))
    rows = figure.subplots(len(reports), 1, sharex=True, squeeze=False)[:, 0]
    window_s = num_iterations * max(report.period_s for report in reports.values())
    for axes, (name, report) in zip(rows, reports.items(), strict=True):
        trained = [span.begin_s for span in report.spans if span.stage == "train"]
        start = trained[len(trained) // 2] if trained else 0.0
        for span in report.spans:
            begin, end = span.begin_s - start, span.end_s - start
            if end <= 0 or begin >= window_s:
                continue
            lane, colour = _LANES[span.stage], _COLOURS[span.stage]
            axes.barh(
                lane, 1e3 * (end - begin), left=1e3 * begin, height=0.78, color=colour,
                edgecolor="white", lw=0.5,
            )  # fmt: skip
            middle = (max(begin, 0) + min(end, window_s)) / 2
            if end - begin > window_s / 20 and 0.01 < middle / window_s < 0.99:
                axes.text(
                    1e3 * middle, lane, str(span.iteration), ha="center", va="center",
                    color="white",
                )  # fmt: skip
        axes.set_title(f"{name}: {1e3 * report.period_s:.0f} ms an iteration", loc="left")
        axes.set_yticks(range(4), _NAMES)
        axes.spines[["top", "right"]].set_visible(False)
    rows[-1].set_xlabel("ms")
    rows[-1].set_xlim(0, 1e3 * window_s)
    save_picture(figure, path, title)
