"""Timeline of calls on ranks: seconds by method, and a picture with a lane for each rank."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from shared.training.pictures import new_picture, save_picture

__all__ = ["Span", "draw", "seconds_by_method"]

# Okabe and Ito's palette, which colour-blind readers can distinguish too.
_COLOURS = (
    "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#F0E442", "#999999",
)  # fmt: skip


class Span(NamedTuple):
    """One call on one rank.

    Attributes:
        call: number of the call, the same on all ranks.
        name: "group.method".
        rank: in the world.
        start_s, stop_s: by the controller's clock; it read the reply at `stop_s`, perhaps some
            time after the reply arrived.
    """

    call: int
    name: str
    rank: int
    start_s: float
    stop_s: float


def seconds_by_method(spans: Sequence[Span]) -> dict[str, float]:
    """Sums, by "group.method", each call's seconds on its slowest rank."""
    calls: dict[int, tuple[str, float]] = {}
    for span in spans:
        taken = span.stop_s - span.start_s
        calls[span.call] = (span.name, max(taken, calls.get(span.call, ("", 0.0))[1]))
    found: dict[str, float] = {}
    for name, taken in calls.values():
        found[name] = found.get(name, 0.0) + taken
    return found


def cut_overlaps(spans: Sequence[Span]) -> list[Span]:
    """Ends each span where its rank's next one starts, as replies may have waited to be read."""
    found, next_s = [], dict[int, float]()
    for span in sorted(spans, key=lambda span: span.stop_s, reverse=True):
        stop_s = min(span.stop_s, next_s.get(span.rank, span.stop_s))
        start_s = min(span.start_s, stop_s)
        found.append(span._replace(start_s=start_s, stop_s=stop_s))
        next_s[span.rank] = start_s
    return found[::-1]


def draw(spans: Sequence[Span], path: Path, title: str, least_share: float = 0.005) -> None:
    """Draws the spans, with a lane for each rank.

    Args:
        spans: at least one.
        path: image file to write; its suffix chooses the format.
        title: title of the picture.
        least_share: smallest share of the whole time; methods that take less are left out.
    """
    spans = cut_overlaps(spans)
    begun = min(span.start_s for span in spans)
    length = max(span.stop_s for span in spans) - begun
    seconds = seconds_by_method(spans)
    names = [n for n in dict.fromkeys(s.name for s in spans) if seconds[n] >= least_share * length]
    ranks = sorted({span.rank for span in spans})
    figure = new_picture(1.4 + 0.2 * -(-len(names) // 2) + 0.4 * len(ranks))
    axes = figure.subplots()
    for name, colour in zip(names, _COLOURS * len(names), strict=False):
        for lane, rank in enumerate(ranks):
            bars = [
                (1e3 * (span.start_s - begun), 1e3 * (span.stop_s - span.start_s))
                for span in spans
                if (span.name, span.rank) == (name, rank)
            ]
            axes.broken_barh(
                bars, (lane - 0.4, 0.8), facecolors=colour, edgecolor="white", linewidth=0.4,
                label=name if lane == 0 else None,
            )  # fmt: skip
    axes.set_yticks(range(len(ranks)), [f"rank {rank}" for rank in ranks])
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds")
    figure.legend(ncols=2, loc="outside lower center", frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    save_picture(figure, path, title)
