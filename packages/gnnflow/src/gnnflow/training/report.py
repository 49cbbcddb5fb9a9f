"""Reports of a continual run: a line a round while it runs, a chart and a page afterwards."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from typing import Any

from gnnflow.training.rounds import STAGES, Round
from shared.errors import ConfigError, DataError

__all__ = ["describe_round", "draw", "write_page"]

_NAMES = {
    "ap": "average precision",
    "auc": "area under the ROC curve",
    "mrr": "mean reciprocal rank",
}
# Okabe and Ito's palette, which colour-blind readers can distinguish too.
_STAGE_COLOURS = dict(
    zip(STAGES, ("#999999", "#56B4E9", "#E69F00", "#D55E00", "#0072B2"), strict=True)
)
_CURVE_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000")


def describe_round(found: Round, metric: str) -> str:
    """One line on a round for a progress display: its number, rate and score.

    Args:
        found: the round.
        metric: "ap", "auc" or "mrr": the score that is shown.
    """
    count = found.num_events + found.num_replayed
    rate = count / found.total_s if found.total_s else 0.0
    score = getattr(found, metric)
    return f"round {found.index}, {rate:,.0f} events/s, {metric} {score:.3f}, events"


def draw(
    curves: Mapping[str, Sequence[Round]],
    path: Path,
    *,
    metric: str = "ap",
    title: str = "",
    is_unix_time: bool = False,
) -> None:
    """Writes an SVG: the metric of each run over time, and below it each run's seconds by stage.

    Args:
        curves: rounds by the name of the run, at most five runs.
        path: the SVG file to write.
        metric: "ap", "auc" or "mrr".
        title: heading of the chart.
        is_unix_time: whether times are seconds since 1970; the axis then shows dates.

    Raises:
        ConfigError: unknown metric, or more than five runs.
        DataError: there is no run, or one without rounds.
    """
    # Imported here, so that runs without a chart do not import matplotlib.
    from matplotlib.figure import Figure

    if metric not in _NAMES:
        raise ConfigError(f"metric: expected one of {list(_NAMES)}, got {metric!r}")
    if len(curves) > len(_CURVE_COLOURS):
        raise ConfigError(f"expected at most {len(_CURVE_COLOURS)} runs, got {len(curves)}")
    if not curves or not all(curves.values()):
        raise DataError("expected at least one run, and a round in each, got none")
    figure = Figure(figsize=(9, 2.8 + 1.9 * len(curves)), layout="constrained")
    figure.suptitle(title, fontsize=11)
    top, *below = figure.subplots(
        1 + len(curves), 1, sharex=True, height_ratios=[3] + [2] * len(curves)
    )
    for (name, rounds), axes, colour in zip(curves.items(), below, _CURVE_COLOURS, strict=False):
        times: list[Any] = [one.time for one in rounds]
        if is_unix_time:
            times = [datetime.fromtimestamp(time, UTC) for time in times]
        top.plot(times, [getattr(one, metric) for one in rounds], label=name, color=colour, lw=1.2)
        seconds = [[getattr(one, f"{stage}_s") for one in rounds] for stage in STAGES]
        axes.stackplot(
            times, *seconds, labels=STAGES, colors=_STAGE_COLOURS.values(), step="post", lw=0
        )
        axes.set_ylabel("seconds a round")
        axes.set_title(name, fontsize=9, loc="left")
    top.set_ylabel(_NAMES[metric])
    # Above their axes, where no curve can run through them.
    place: dict[str, Any] = {"loc": "lower right", "bbox_to_anchor": (1, 1), "ncols": 5}
    for axes in (top, below[0]):
        axes.legend(fontsize=8, frameon=False, borderaxespad=0.2, **place)
    below[-1].set_xlabel("" if is_unix_time else "time of a round's first event")
    figure.savefig(path, format="svg")


def write_page(
    curves: Mapping[str, Sequence[Round]],
    folder: Path,
    *,
    metric: str = "ap",
    title: str = "",
    about: Mapping[str, str] | None = None,
    is_unix_time: bool = False,
) -> Path:
    """Writes `continual.svg`, and `continual.html`, which embeds it and needs no other file.

    Args:
        curves: as for `draw`.
        folder: folder of both files, made if missing.
        metric: as for `draw`.
        title: heading of the page and the chart.
        about: settings to list, by name.
        is_unix_time: as for `draw`.

    Returns:
        Path of the page.

    Raises:
        ConfigError: as for `draw`.
        DataError: as for `draw`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    picture = folder / "continual.svg"
    draw(curves, picture, metric=metric, title=title, is_unix_time=is_unix_time)
    source = base64.b64encode(picture.read_bytes()).decode()
    settings = "".join(
        f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>"
        for name, value in (about or {}).items()
    )
    head = ["run", "rounds", "events", "replayed", metric, *(f"{stage} s" for stage in STAGES)]
    rows = "".join(_row(name, rounds, metric) for name, rounds in curves.items())
    page = folder / "continual.html"
    page.write_text(
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(title)}</title>'
        "<style>body{font:15px system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}"
        "img{width:100%}table{border-collapse:collapse;margin:1rem 0}"
        "th,td{padding:.2rem .7rem;text-align:right;border-bottom:1px solid #ddd}"
        "th:first-child,td:first-child{text-align:left}</style>"
        f"<h1>{escape(title)}</h1>"
        f'<img alt="{escape(_NAMES[metric])} over time, and seconds by stage" '
        f'src="data:image/svg+xml;base64,{source}">'
        f"<table><tr>{''.join(f'<th>{escape(name)}</th>' for name in head)}</tr>{rows}</table>"
        f"<p>{escape(_NAMES[metric].capitalize())} is the mean over rounds, weighted by events; "
        "seconds are of all rounds.</p>"
        f"<table>{settings}</table></html>\n"
    )
    return page


def _row(name: str, rounds: Sequence[Round], metric: str) -> str:
    num_events = sum(one.num_events for one in rounds)
    score = sum(getattr(one, metric) * one.num_events for one in rounds) / num_events
    cells = [
        escape(name),
        f"{len(rounds):,}",
        f"{num_events:,}",
        f"{sum(one.num_replayed for one in rounds):,}",
        f"{score:.4f}",
        *(f"{sum(getattr(one, f'{stage}_s') for one in rounds):.1f}" for stage in STAGES),
    ]
    return f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"
