"""Pictures in one style: one width and one text size, so that any two can stand on one page.

A picture is a column of panels as wide as a telephone shows without shrinking its text much.
Matplotlib is imported when a picture is begun; the packages that draw bring it along.
"""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["TEXT_PT", "WIDTH_IN", "new_picture", "save_picture", "show_dates"]

WIDTH_IN = 4.2
TEXT_PT = 9.0
_LETTER_IN = 0.53 * TEXT_PT / 72  # mean width of a letter


def new_picture(height_in: float) -> Figure:
    """Begins a picture of the common width.

    Args:
        height_in: height in inches, with room for a line of title.
    """
    from matplotlib.figure import Figure

    return Figure(figsize=(WIDTH_IN, height_in), layout="constrained")


def save_picture(figure: Figure, path: Path, title: str) -> None:
    """Gives all text its one size and writes the picture, with the title above it.

    The title is also the `<title>` of an SVG, which is read out where the picture is not seen. The
    same picture gives the same bytes, whatever the day.

    Args:
        figure: from `new_picture`.
        path: image file to write; its suffix chooses the format. Its folder is made if missing.
        title: what the picture shows, in a sentence; broken into lines that fit.
    """
    from matplotlib import rc_context
    from matplotlib.text import Text

    figure.suptitle(textwrap.fill(title, int(WIDTH_IN / _LETTER_IN)))
    for text in figure.findobj(Text):
        text.set_fontsize(TEXT_PT)
    for axes in figure.axes:  # labels of ticks are made anew when the picture is drawn
        axes.tick_params(which="both", labelsize=TEXT_PT)
    path.parent.mkdir(parents=True, exist_ok=True)
    about = {"Title": title, "Date": None} if path.suffix == ".svg" else None
    with rc_context({"svg.hashsalt": path.name}):
        figure.savefig(path, metadata=about)


def show_dates(axes: Axes) -> None:
    """Labels an x axis of datetimes with as few words as tell them apart: "Mar", "02", "03"."""
    from matplotlib.dates import AutoDateLocator, ConciseDateFormatter

    locator = AutoDateLocator(minticks=3, maxticks=7)
    axes.xaxis.set_major_locator(locator)
    axes.xaxis.set_major_formatter(ConciseDateFormatter(locator))
