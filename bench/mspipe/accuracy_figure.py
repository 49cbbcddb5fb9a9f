"""The picture that `bench_staleness` leaves beside its table."""

from pathlib import Path

import numpy as np
from accuracy_runs import EDGEBANK, KINDS
from matplotlib.figure import Figure

# Okabe and Ito's palette, told apart by colour-blind readers too.
COLOURS = ("#0072B2", "#D55E00", "#E69F00", "#CC79A7", "#009E73")
MEASURES = {"ap": "AP", "mrr": "MRR"}


def draw(test: str, scores: dict, bank: dict, path: Path):
    """A row of panels a measure, one a kind of negatives: a dot a seed, and a bar at their mean.

    Args:
        test: what was tested on.
        scores: by variant, of each seed the scores by kind and measure.
        bank: EdgeBank's scores by kind and measure.
        path: of the SVG.
    """
    figure = Figure(figsize=(9, 5.6), layout="constrained")
    figure.suptitle(f"TGN on {test}, by how stale memory was in training", fontsize=10)
    panels = figure.subplots(len(MEASURES), len(KINDS), sharey=True, squeeze=False)
    names = list(scores)
    for row, (measure, told) in zip(panels, MEASURES.items(), strict=True):
        for axes, kind in zip(row, KINDS, strict=True):
            for place, name in enumerate(names):
                values = np.array([one[kind][measure] for one in scores[name]])
                colour = COLOURS[place % len(COLOURS)]
                jitter = place + np.linspace(-0.2, 0.2, len(values)) * (len(values) > 1)
                axes.plot(values, jitter, "o", ms=4.5, color=colour, alpha=0.75, mew=0)
                axes.plot([values.mean()] * 2, [place - 0.36, place + 0.36], color=colour, lw=2)
            axes.axvline(bank[kind][measure], color="#777777", lw=1, ls=":")
            axes.annotate(
                EDGEBANK, (bank[kind][measure], 1), (3, -9), xycoords=("data", "axes fraction"),
                textcoords="offset points", fontsize=7.5, color="#777777",
            )  # fmt: skip
            axes.set_yticks(range(len(names)), names)
            axes.set_ylim(len(names) - 0.4, -0.9)
            axes.margins(x=0.12)
            axes.set_xlabel(f"{told}, {kind} negatives", fontsize=9)
            axes.spines[["top", "right"]].set_visible(False)
            axes.grid(axis="x", lw=0.4, color="#dddddd")
    figure.savefig(path, format=path.suffix[1:])
