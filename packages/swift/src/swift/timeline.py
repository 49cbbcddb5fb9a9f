"""A picture of a failure, second by second: what each rank did before, during and after it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.patches import Patch

from shared.training.pictures import new_picture, save_picture

__all__ = ["Bar", "draw_failure", "draw_record", "place_phases"]

_MOST_ROWS = 32
_COLOURS = {
    "step": "#9ecae1",
    "detect": "#de2d26",
    "join": "#fdae6b",
    "undo": "#756bb1",
    "transfer": "#31a354",
    "replay": "#31a354",
    "verify": "#969696",
    "repeat": "#3182bd",
}


@dataclass(frozen=True, slots=True)
class Bar:
    """What one rank did for a while.

    Attributes:
        what: "step", or a phase of `swift.report.PHASES`.
        start_s: when it began.
        end_s: when it ended.
    """

    what: str
    start_s: float
    end_s: float


def place_phases(seconds: Mapping[str, float], end_s: float) -> list[Bar]:
    """The phases of a recovery one after another, the last one ending at `end_s`.

    Args:
        seconds: of each phase, in order.
        end_s: when the last one ended.
    """
    bars: list[Bar] = []
    for what, lasted_s in reversed(list(seconds.items())):
        bars.insert(0, Bar(what, end_s - lasted_s, end_s))
        end_s -= lasted_s
    return bars


def draw_record(record: Mapping[str, Any], path: Path) -> None:
    """Draws one failure of a run's report, or of a rank's own: a row a rank, from the loss on.

    Args:
        record: as `swift.report` describes it. Of more than 32 ranks the first are drawn.
        path: of the SVG file.
    """
    ranks = record.get("ranks") or {str(record["rank"]): record}
    rows = {}
    for rank in sorted(ranks, key=int)[:_MOST_ROWS]:
        one = ranks[rank]
        name = f"spare, now rank {rank}" if one["is_newcomer"] else f"rank {rank}"
        rows[name] = place_phases(one["seconds"], sum(one["seconds"].values()))
    title = "What each rank did after one was lost"
    draw_failure(rows, path, x_label="seconds after the loss", title=title)


def draw_failure(
    rows: Mapping[str, Sequence[Bar]],
    path: Path,
    *,
    lost: tuple[str, float] | None = None,
    x_label: str | None = None,
    title: str = "What each process did before and after one was killed (x)",
) -> None:
    """Draws a row a process, time from left to right.

    Args:
        rows: bars by the process's name, from top to bottom.
        path: of the SVG file.
        lost: the row of the process that was killed and when; time then begins there.
        x_label: of the time; None: seconds, after the kill if there is one.
        title: for those who do not see the picture.
    """
    figure = new_picture(1.3 + 0.4 * len(rows))
    axes = figure.subplots()
    zero_s = 0.0 if lost is None else lost[1]
    names = list(rows)
    for at, bars in enumerate(rows.values()):
        for bar in bars:
            axes.barh(
                at,
                bar.end_s - bar.start_s,
                left=bar.start_s - zero_s,
                height=0.6,
                color=_COLOURS[bar.what],
                edgecolor="white",
                linewidth=0.4,
            )
    if lost is not None:
        axes.plot([0], [names.index(lost[0])], "x", color="black", markersize=9, zorder=3)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlabel(x_label or ("seconds" if lost is None else "seconds after the kill"))
    used = [
        what for what in _COLOURS if any(b.what == what for bars in rows.values() for b in bars)
    ]
    axes.locator_params(axis="x", nbins=6)
    figure.legend(
        handles=[Patch(color=_COLOURS[what], label=what) for what in used],
        loc="outside lower center",
        ncols=4,
        frameon=False,
    )
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    save_picture(figure, path, title)
