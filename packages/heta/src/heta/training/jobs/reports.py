"""Tables of epochs and of strategies, as text."""

from __future__ import annotations

from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from heta.training.jobs.comparison import StrategyComparison
from shared.cli import draw_table
from shared.units import format_bytes

__all__ = ["describe_scores", "draw_comparison", "draw_epochs"]


def describe_scores(scores: dict[str, Any] | None) -> str:
    """Writes the scores of a split; nothing if it has no nodes."""
    if scores is None:
        return ""
    text = f"accuracy {scores['accuracy']:.4f}"
    if scores["auc"] is not None:
        text += f", AUROC {scores['auc']:.4f}, AP {scores['average_precision']:.4f}"
    return text


def draw_epochs(epochs: list[dict[str, Any]], test: dict[str, Any] | None) -> str:
    """Draws losses and scores by epoch, and the scores of the split "test"."""
    table = Table("epoch", "loss", "val", "s", "sent by rank 0", box=SIMPLE_HEAD)
    for epoch in epochs:
        table.add_row(
            str(epoch["epoch"]),
            f"{epoch['loss']:.4f}",
            describe_scores(epoch["val"]),
            f"{epoch['seconds']:.2f}",
            format_bytes(epoch["sent_bytes"]),
        )
    text = draw_table(table).strip("\n ")
    return text if test is None else f"{text}\ntest: {describe_scores(test)}"


def draw_comparison(comparison: StrategyComparison) -> tuple[dict[str, Any], str]:
    """Makes a record and a table of the strategies' steps, measured beside predicted."""
    table = Table(
        "strategy", "step ms", "min - max", "predicted", "MB", "predicted", box=SIMPLE_HEAD
    )
    rows = {}
    for name, timing in comparison.timings.items():
        plan = comparison.plans[name]
        table.add_row(
            name,
            f"{timing.median_s * 1e3:.1f}",
            f"{min(timing.step_s) * 1e3:.1f} - {max(timing.step_s) * 1e3:.1f}",
            f"{plan.step_s * 1e3:.1f}",
            f"{timing.sent_bytes / 1e6:.3f}",
            f"{plan.sent_bytes / 1e6:.3f}",
        )
        rows[name] = {
            "step_s": timing.step_s,
            "predicted_step_s": plan.step_s,
            "sent_bytes": timing.sent_bytes,
            "predicted_sent_bytes": plan.sent_bytes,
            "losses": timing.losses,
        }
    alone = comparison.alone
    table.add_row("one process", f"{alone.median_s * 1e3:.1f}", "", "", "0", "")
    rows["one process"] = {"step_s": alone.step_s, "losses": alone.losses}
    return rows, draw_table(table).strip("\n ")
