"""What the commands print and draw: measured operators, advice, and who waits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from shared.training.pictures import new_picture, save_picture
from shared.units import format_bytes, format_s

if TYPE_CHECKING:
    from qsync.diagnosis.advise import Advice
    from qsync.profiler.indicator import OperatorNoise
    from qsync.profiler.profile import RankProfile

__all__ = ["describe_advice", "describe_noise", "describe_profile", "draw_waits"]

_COLORS = {"computes": "#0b7285", "waits": "#99d5df"}


def describe_profile(profile: RankProfile) -> str:
    """Writes a table of each operator's seconds, forward and backward, in each precision."""
    names = [profile.graph.ops[i].name for i in profile.graph.linears]
    precisions = list(profile.forward_s[names[0]])
    rows = [
        [name, *(format_s(profile.forward_s[name][p] + profile.backward_s[name][p]) for p in precisions)]
        for name in names
    ]  # fmt: skip
    head = f"{profile.device}: a float32 step takes {format_s(profile.step_s)}"
    return "\n".join([head, *profile.notes, _draw_table(["operator", *precisions], rows)])


def describe_noise(measured: OperatorNoise) -> str:
    """Writes a table of what lowering each operator costs the gradient, the most sensitive first."""
    precisions = list(next(iter(measured.noise.values())))
    # The lowest precision comes first.
    order = sorted(measured.noise, key=lambda name: -measured.noise[name][precisions[0]])
    rows = [[name, *(f"{measured.noise[name][p]:.3g}" for p in precisions)] for name in order]
    reason = f" ({measured.reason})" if measured.reason else ""
    head = f"squared relative error of the gradient, by {measured.method}{reason}"
    return f"{head}\n{_draw_table(['operator', *precisions], rows)}"


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


def draw_waits(rows: Mapping[str, tuple[float, float]], title: str, path: Path) -> None:
    """Draws a bar a row: seconds of computing, then of waiting.

    Args:
        rows: seconds of computing and of waiting, by the label of the bar.
        title: of the picture.
        path: SVG file to write.
    """
    figure = new_picture(1.4 + 0.3 * len(rows))
    axes = figure.add_subplot()
    busy, waits = ([1e3 * seconds for seconds in row] for row in zip(*rows.values(), strict=True))
    axes.barh(list(rows), busy, color=_COLORS["computes"], label="computes")
    bars = axes.barh(list(rows), waits, left=busy, color=_COLORS["waits"], label="waits")
    axes.bar_label(bars, [f"{each:.0f}" for each in waits], padding=2)
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set(xlabel="milliseconds of a step")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(
        *axes.get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False
    )
    save_picture(figure, path, title)


def _draw_table(heads: list[str], rows: list[list[str]]) -> str:
    from rich.table import Table

    from shared.cli import draw_table

    table = Table(*heads)
    for row in rows:
        table.add_row(*row)
    return draw_table(table)
