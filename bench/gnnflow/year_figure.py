"""The picture that `bench_year` leaves beside its table."""

import datetime
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.dates import DateFormatter, MonthLocator
from matplotlib.figure import Figure
from year_ways import COUNTED, FROZEN, RETRAINED, TFTGN, TGAT, Found, Year

# Okabe and Ito's palette, told apart by colour-blind readers too.
COLOURS = {
    TGAT: "#0072B2",
    TFTGN: "#009E73",
    RETRAINED: "#D55E00",
    FROZEN: "#CC79A7",
    COUNTED: "#777777",
}


def draw(year: Year, runs: dict[str, Found], weekly: dict[str, np.ndarray], path: Path):
    """Average precision by week above, and seconds of training so far below."""

    def day(place: int) -> datetime.datetime:
        seconds = int(year.events.t[min(place, len(year.events) - 1)])
        return datetime.datetime.fromtimestamp(seconds, datetime.UTC)

    figure = Figure(figsize=(9, 6.6), layout="constrained")
    figure.suptitle(
        "Where aircraft fly next: departures from New York, January to June 2013, each told from another of the "
        "aircraft's airports",
        fontsize=10,
    )
    top, below = figure.subplots(2, 1, sharex=True, height_ratios=[3, 2])
    begins = [day(place) for place in [year.january, *year.week_ends[:-1]]]
    for name, ap in weekly.items():
        colour, width = COLOURS[name], 1.0 if name == COUNTED else 1.6
        top.plot(begins, ap, color=colour, lw=width, ls=":" if name == COUNTED else "-")
    # The last week is short, and its noise is no place for a name.
    label(
        top,
        begins[-1],
        {name: float(ap[-6:-1].mean()) for name, ap in weekly.items()},
        0.055,
    )
    top.set_ylabel("average precision of a week, before it is learnt")
    for name, found in runs.items():
        spent = found.spent
        if spent:
            is_step = name == RETRAINED
            below.plot(
                [day(place) for place, _ in spent],
                [seconds for _, seconds in spent],
                color=COLOURS[name],
                drawstyle="steps-post" if is_step else "default",
                lw=1.6,
            )
    ends = {name: found.spent[-1][1] for name, found in runs.items() if found.spent}
    label(below, begins[-1], ends, 0.08)
    below.set_ylabel("seconds of training so far")
    below.set_xlabel("begin of the week (UTC)")
    below.set_ylim(bottom=0)
    below.xaxis.set_major_locator(MonthLocator())
    below.xaxis.set_major_formatter(DateFormatter("%-d %b\n%Y"))
    for axes in (top, below):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", lw=0.4, color="#dddddd")
    figure.savefig(path, format=path.suffix[1:])


def label(axes: Axes, at: datetime.datetime, heights: dict[str, float], share: float) -> None:
    """Names of lines behind their ends, at least a share of the axes apart."""
    low, high = axes.get_ylim()
    gap = (high - low) * share
    place = -np.inf
    for name in sorted(heights, key=lambda name: heights[name]):
        place = max(heights[name], place + gap)
        axes.annotate(
            name, (at, place), (8, 0), textcoords="offset points", va="center", fontsize=8,
            color=COLOURS[name], annotation_clip=False,
        )  # fmt: skip
