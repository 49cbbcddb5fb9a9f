"""Advice in words, and a picture of who waits for whom."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median_low

from qsync.diagnosis.advise import Advice
from qsync.diagnosis.collectives import Interval, merge, split_waits
from qsync.diagnosis.diagnose import Diagnosis
from shared.errors import ConfigError
from shared.training.pictures import new_picture, save_picture
from shared.units import format_bytes, format_s

__all__ = ["describe_advice", "draw_waits"]

_COLOURS = {"computes": "#0b7285", "waits": "#ffd8a8", "transfers": "#868e96"}


def describe_advice(advices: Sequence[Advice]) -> str:
    """Lists changes in order, each on top of those before it."""
    if not advices:
        return "Advice: no change gains 1 % of a step."
    lines = ["Advice, each on top of those before it (predicted):"]
    for number, advice in enumerate(advices, 1):
        saves = f", saves {format_bytes(advice.saved_bytes)} in all" if advice.saved_bytes else ""
        lines.append(
            f"  {number}. {advice.text}: {format_s(advice.step_s)} a step, "
            f"{advice.gain:.2f} times as fast{saves}"
        )
    return "\n".join(lines)


def draw_waits(diagnoses: Mapping[str, Diagnosis], path: str | os.PathLike[str]) -> None:
    """Draws one step of each job on one scale of time: what its ranks compute, wait for and transfer.

    The step is the one of median length. A rank has two bars: its computing, and below it the
    collectives that it has joined.

    Args:
        diagnoses: by what is written above each, such as "before" and "after".
        path: image file to write; its suffix chooses the format.

    Raises:
        ConfigError: there is nothing to draw.
    """
    if not diagnoses:
        raise ConfigError("expected a diagnosis to draw, got none; diagnose a job's traces")
    steps = {title: _list_bars(diagnosis) for title, diagnosis in diagnoses.items()}
    num_ranks = sum(len(ranks) for ranks in steps.values())
    figure = new_picture(1.2 + 0.5 * len(steps) + 0.32 * num_ranks)
    panels = figure.subplots(
        len(steps), 1, sharex=True, squeeze=False,
        height_ratios=[len(ranks) for ranks in steps.values()],
    )[:, 0]  # fmt: skip
    for axes, (title, ranks) in zip(panels, steps.items(), strict=True):
        for rank, bars in enumerate(ranks):
            for what, spans_s in bars.items():
                top = rank - 0.42 if what == "computes" else rank + 0.02
                spans_ms = [(1e3 * start_s, 1e3 * (end_s - start_s)) for start_s, end_s in spans_s]
                is_first = axes is panels[0] and rank == 0
                axes.broken_barh(
                    spans_ms,
                    (top, 0.4),
                    facecolors=_COLOURS[what],
                    label=what if is_first else None,
                )
        axes.set_yticks(range(len(ranks)), [f"rank {rank}" for rank in range(len(ranks))])
        axes.invert_yaxis()
        axes.set_title(title, loc="left")
        axes.spines[["top", "right"]].set_visible(False)
    panels[-1].set_xlabel("milliseconds of a step")
    figure.legend(ncols=3, loc="outside lower center", frameon=False)
    save_picture(figure, Path(path), "Who waits in a training step, by rank")


def _list_bars(diagnosis: Diagnosis) -> list[dict[str, list[Interval]]]:
    """Bars of the median step by rank, in seconds since its first start."""
    lanes = diagnosis.job.lanes
    bounds = []
    for step in range(len(diagnosis.steps)):
        pieces = [piece for lane in lanes for piece in lane if piece.step == step]
        start_s = min(piece.start_s - piece.gap_s for piece in pieces)
        bounds.append((max(piece.end_s for piece in pieces) - start_s, start_s, step))
    length_s, begin_s, step = median_low(bounds)
    collectives = [c for c in diagnosis.collectives if c.step == step]

    def cut(spans: Sequence[Interval]) -> list[Interval]:
        moved = [(start_s - begin_s, end_s - begin_s) for start_s, end_s in spans]
        return [(max(a, 0.0), min(b, length_s)) for a, b in moved if b > 0 and a < length_s]

    ranks = []
    for rank, lane in enumerate(lanes):
        waits, transfers = split_waits(collectives, rank)
        busy = merge((p.start_s - p.gap_s, p.end_s) for p in lane if p.step == step)
        ranks.append(
            {
                "computes": cut(busy),
                "waits": cut([span for _, span in waits]),
                "transfers": cut(transfers),
            }
        )
    return ranks
