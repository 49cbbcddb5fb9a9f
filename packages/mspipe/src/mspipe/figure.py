"""What ran when: the stages of a few iterations, one run above the other."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from matplotlib.figure import Figure

from mspipe.planner import STAGES
from mspipe.report import Report

__all__ = ["draw"]

# Okabe and Ito's palette, told apart by colour-blind readers too.
_COLOURS = dict(zip(STAGES, ["#56B4E9", "#999999", "#0072B2", "#D55E00", "#009E73"], strict=True))
_LANES = {"sample": 3, "features": 2, "memory": 2, "train": 1, "write": 0}
_NAMES = ["write back", "train", "fetch", "sample"]


def draw(reports: Mapping[str, Report], path: Path, title: str, num_iterations: int = 6) -> None:
    """Draws the middle iterations of each run on one scale of time.

    Args:
        reports: by the name that stands above.
        path: an SVG.
        title: of the picture.
        num_iterations: of each run.
    """
    figure = Figure(figsize=(9, 0.7 + 1.7 * len(reports)), layout="constrained")
    figure.suptitle(title, fontsize=10)
    rows = figure.subplots(len(reports), 1, sharex=True, squeeze=False)[:, 0]
    for axes, (name, report) in zip(rows, reports.items(), strict=True):
        first = max(0, report.num_iterations // 2 - num_iterations // 2)
        shown = [s for s in report.spans if first <= s.iteration < first + num_iterations]
        start = min(s.begin_s for s in shown if s.stage == "memory")
        for span in shown:
            begin, length = 1e3 * (span.begin_s - start), 1e3 * (span.end_s - span.begin_s)
            lane = _LANES[span.stage]
            axes.barh(
                lane, length, left=begin, height=0.78, color=_COLOURS[span.stage],
                edgecolor="white", lw=0.5,
            )  # fmt: skip
            if span.stage == "train":
                axes.text(
                    begin + length / 2, lane, str(span.iteration), ha="center", va="center",
                    fontsize=7, color="white",
                )  # fmt: skip
        axes.set_title(
            f"{name}: {1e3 * report.period_s:.0f} ms an iteration", loc="left", fontsize=9
        )
        axes.set_yticks(range(4), _NAMES, fontsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    rows[-1].set_xlabel("ms")
    rows[-1].set_xlim(left=0)
    figure.savefig(path, format="svg")
