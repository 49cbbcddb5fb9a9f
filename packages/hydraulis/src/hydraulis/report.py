"""Strategies beside each other: a table, and a picture of a step's ranks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hydraulis.simulator import Outcome
from shared.errors import ConfigError
from shared.training.pictures import new_picture, save_picture

__all__ = ["draw_ranks", "strategy_table"]

_BUSY, _IDLE = "#0b7285", "#ffd8a8"
_MOST_RANKS = 16


def strategy_table(outcomes: Sequence[Outcome]) -> str:
    """A line for each strategy, the last one's seconds taken as 1; simulated seconds.

    Args:
        outcomes: of the same steps.
    """
    ours = outcomes[-1].median_s
    width = max(len(one.name) for one in outcomes)
    lines = [
        f"{'':<{width}}  {'step s':>8}  {'range':>15}  {'times ours':>10}  {'idle':>5}  {'gap':>6}"
    ]
    for one in outcomes:
        if one.median_s == float("inf"):
            lines.append(f"{one.name:<{width}}  does not fit")
            continue
        span = f"{min(one.step_s):.3g} to {max(one.step_s):.3g}"
        idle = sorted(one.idle_shares)[len(one.idle_shares) // 2]
        lines.append(
            f"{one.name:<{width}}  {one.median_s:>8.3g}  {span:>15}  {one.median_s / ours:>9.2f}x  "
            f"{idle:>5.0%}  {one.gap:>6.1%}"
        )
    return "\n".join(lines)


def draw_ranks(outcomes: Sequence[Outcome], path: str | Path) -> None:
    """Draws one step's ranks under each strategy: what they compute, and how long they wait.

    Args:
        outcomes: of the same steps; of many ranks some, evenly, in order of their seconds.
        path: image file to write; its suffix chooses the format.

    Raises:
        ConfigError: no strategy could place the documents.
    """
    shown = [one for one in outcomes if one.step_s[0] != float("inf")]
    if not shown:
        raise ConfigError("expected a strategy that places the documents, got none")
    end_s = max(max(one.rank_s) for one in shown)
    figure = new_picture(0.8 + 0.9 * len(shown))
    panels = figure.subplots(len(shown), 1, sharex=True, squeeze=False)[:, 0]
    for axes, one in zip(panels, shown, strict=True):
        seconds = sorted(one.rank_s, reverse=True)
        count = min(len(seconds), _MOST_RANKS)
        picked = [seconds[at * len(seconds) // count] for at in range(count)]
        axes.barh(range(count), [max(seconds)] * count, color=_IDLE, height=0.9)
        axes.barh(range(count), picked, color=_BUSY, height=0.9)
        axes.set(yticks=[], xlim=(0, 1.02 * end_s))
        axes.invert_yaxis()
        axes.set_title(one.name, loc="left")
        axes.spines[["top", "right", "left"]].set_visible(False)
    panels[-1].set_xlabel("seconds of a step (simulated)")
    title = "A step under each strategy, a bar a rank: dark while it computes, light while it waits"
    save_picture(figure, Path(path), title)
