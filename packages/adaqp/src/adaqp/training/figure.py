"""Figures: the seconds of an epoch by phase under each policy, and the widths chosen."""

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from adaqp.messages.clock import PHASES
from adaqp.planner.widths import WIDTHS
from adaqp.training.comparison import Timing

__all__ = ["draw"]

# Okabe and Ito's palette, which colour-blind readers can tell apart.
_PHASE_COLOURS = dict(
    zip(PHASES, ("#0072B2", "#E69F00", "#D55E00", "#999999", "#CC79A7", "#000000"), strict=True)
)
_DROPPED_COLOUR = "#ffffff"


def draw(timings: list[Timing], title: str, path: Path) -> None:
    """Writes an SVG: epoch time by phase for each policy, and the adaptive policy's widths.

    Args:
        timings: results of `adaqp.training.comparison.compare`.
        title: title of the figure, such as model, graph and network.
        path: SVG file to write.
    """
    adaptive = [t for t in timings if t.policy.name == "adaptive"]
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    figure.suptitle(title, fontsize=11)
    left, right = figure.subplots(1, 2, width_ratios=[3, 2])
    names = [t.policy.label for t in timings]
    start = [0.0] * len(timings)
    for phase in PHASES:
        widths = [t.seconds[phase] for t in timings]
        if phase == "compile" and not any(widths):
            continue  # as always, but in the first steps of an installation
        left.barh(names, widths, left=start, label=phase, color=_PHASE_COLOURS[phase])
        start = [a + b for a, b in zip(start, widths, strict=True)]
    for place, (timing, end) in enumerate(zip(timings, start, strict=True)):
        gain = timings[0].median_s / timing.median_s
        left.text(end, place, f" {timing.median_s:.2f} s ({gain:.1f}x)", va="center", fontsize=9)
    left.invert_yaxis()
    left.set_xlim(0, 1.25 * max(start))
    left.set_xlabel("seconds an epoch on rank 0, median by phase")
    _legend_below(left)
    if adaptive:
        channels = sorted(adaptive[0].bits)
        start = [0.0] * len(channels)
        for bits in sorted({b for c in channels for b in adaptive[0].bits[c]}):
            shares = [100 * adaptive[0].bits[c].get(bits, 0.0) for c in channels]
            label = f"{bits} bit" + "s" * (bits > 1)
            colour = WIDTHS.get(bits).colour if bits in WIDTHS else _DROPPED_COLOUR
            right.barh(channels, shares, left=start, label=label, color=colour)
            start = [a + b for a, b in zip(start, shares, strict=True)]
        right.invert_yaxis()
        right.set_xlabel("% of rank 0's rows, adaptive policy")
        _legend_below(right)
    figure.savefig(path, format="svg")


def _legend_below(axes: Axes) -> None:
    axes.legend(fontsize=8, ncols=6, loc="upper center", bbox_to_anchor=(0.5, -0.16), frameon=False)
