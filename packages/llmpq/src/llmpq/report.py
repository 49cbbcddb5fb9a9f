"""Plans beside each other: a table, and a picture of their stages by phase."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from llmpq.evaluation import Timing
from shared.errors import ConfigError
from shared.training.pictures import new_picture, save_picture

__all__ = ["draw_stages", "timing_table"]

_PHASES = ("prefill", "decode")
_MEASURED, _PREDICTED = "#2b6c99", "#b9cfdd"


def timing_table(timings: Sequence[Timing]) -> str:
    """A line for each plan, and one for each of its stages; seconds of stages in milliseconds.

    Args:
        timings: as `compare_plans` returns them.
    """
    lines = [f"{'plan':<12}  {'seconds':>8}  {'range':>15}  {'predicted':>9}  {'tokens/s':>8}"]
    for one in timings:
        span = f"{min(one.turns_s):.3g} to {max(one.turns_s):.3g}"
        lines.append(
            f"{one.name:<12}  {one.median_s:>8.3g}  {span:>15}  {_shown(one.predicted_s):>9}  "
            f"{one.tokens_per_s:>8.4g}"
        )
    lines += ["", f"{'plan':<12}  rank  layers  prefill ms (predicted)  decode ms (predicted)"]
    for one in timings:
        for stage in one.stages:
            prefill, decode = (
                f"{1e3 * seconds:.3g} ({_shown(None if told is None else 1e3 * told)})"
                for seconds, told in (
                    (stage.prefill_s, stage.predicted_prefill_s),
                    (stage.decode_s, stage.predicted_decode_s),
                )
            )
            layers = f"{stage.layers[0]}-{stage.layers[1] - 1}"
            lines.append(
                f"{one.name:<12}  {stage.rank:>4}  {layers:>6}  {prefill:>22}  {decode:>21}"
            )
    return "\n".join(lines)


def draw_stages(timings: Sequence[Timing], path: str | Path) -> None:
    """Draws the seconds of a micro-batch on each stage, by phase, predicted beside measured.

    Args:
        timings: as `compare_plans` returns them, at least one.
        path: image file to write; its suffix chooses the format.

    Raises:
        ConfigError: there is nothing to draw.
    """
    if not timings:
        raise ConfigError("expected the timing of a plan to draw, got none")
    rows = sum(len(one.stages) for one in timings)
    figure = new_picture(1.3 + 0.4 * rows)
    for axes, phase in zip(figure.subplots(1, 2, sharey=True), _PHASES, strict=True):
        place, places, names = 0.0, [], []
        for one in timings:
            for stage in one.stages:
                measured = 1e3 * getattr(stage, f"{phase}_s")
                told = getattr(stage, f"predicted_{phase}_s")
                is_first = not places
                axes.barh(
                    place - 0.2, measured, 0.4, color=_MEASURED,
                    label="measured" if is_first else None,
                )  # fmt: skip
                axes.barh(
                    place + 0.2, 1e3 * (told or 0.0), 0.4, color=_PREDICTED,
                    label="predicted" if is_first else None,
                )  # fmt: skip
                places.append(place)
                names.append(f"{one.name}, rank {stage.rank}")
                place += 1
            place += 0.5  # plans stand apart
        axes.set_yticks(places, names)
        axes.set_xlabel(f"{phase}, ms")
        axes.spines[["top", "right"]].set_visible(False)
    axes.invert_yaxis()
    handles = axes.get_legend_handles_labels()
    figure.legend(*handles, ncols=2, loc="outside lower center", frameon=False)
    title = "Milliseconds of a micro-batch on each stage, by phase, predicted beside measured"
    save_picture(figure, Path(path), title)


def _shown(number: float | None) -> str:
    return "-" if number is None else f"{number:.3g}"
