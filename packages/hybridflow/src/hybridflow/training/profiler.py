"""`hybridflow bench`: measures the time of a recipe's step, in all and by method."""

from __future__ import annotations

import json
import statistics
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rich.table import Table

from hybridflow.training.build_models import start_workers
from hybridflow.training.config import Recipe
from hybridflow.training.runtime import Run
from hybridflow.workers.timeline import draw
from shared.files import write_atomically
from shared.training.progress import show_progress

__all__ = ["Measured", "measure"]

_WARM_UP = 2
_DRAWN = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Measurements of a recipe's steps.

    Attributes:
        num_responses: responses per step.
        step_s: seconds of each step.
        num_tokens: tokens generated in each step.
        method_s: by "group.method", seconds per step, summed over calls' slowest ranks.
    """

    num_responses: int
    step_s: list[float]
    num_tokens: list[float]
    method_s: dict[str, list[float]]

    def table(self, title: str) -> Table:
        """A table of medians, and the range from the fastest to the slowest step."""
        typical_s = statistics.median(self.step_s)
        table = Table(title=title, title_justify="left")
        for name in ("", "ms", "fastest", "slowest", "of a step"):
            table.add_column(name, justify="left" if not name else "right")
        for name, found in {"step": self.step_s, **self._by_length()}.items():
            cells = (statistics.median(found), min(found), max(found))
            share = statistics.median(found) / typical_s
            table.add_row(name, *(f"{1e3 * value:.1f}" for value in cells), f"{share:.0%}")
        rates = (self.num_responses, statistics.median(self.num_tokens))
        table.caption = (
            f"{rates[0] / typical_s:,.0f} responses and {rates[1] / typical_s:,.0f} generated "
            f"tokens a second, after {_WARM_UP} steps that are not counted; methods of groups on "
            f"different pools may overlap"
        )
        return table

    def _by_length(self) -> dict[str, list[float]]:
        return dict(sorted(self.method_s.items(), key=lambda item: -statistics.median(item[1])))


def measure(recipe: Recipe, num_steps: int, out: Path | None, title: str) -> Measured:
    """Trains for some steps, and measures their time.

    Args:
        recipe: recipe of the run.
        num_steps: steps to measure, after two warm-up steps.
        out: folder for bench.json and timeline.svg; None for neither.
        title: title of the picture.
    """
    recipe = replace(recipe, steps=num_steps + _WARM_UP)
    with start_workers(recipe) as workers, show_progress("steps", recipe.steps) as progress:
        told, spans = [], []
        run = Run.set_up(recipe, workers)
        for metrics in run.steps():
            told.append(metrics)
            spans.append(run.spans)
            progress.advance()
    told = told[_WARM_UP:]
    names = {name for metrics in told for name in metrics if "." in name}
    found = Measured(
        num_responses=recipe.batch_size,
        step_s=[metrics["seconds"] for metrics in told],
        num_tokens=[metrics["response_length"] * recipe.batch_size for metrics in told],
        method_s={
            name.removesuffix("_s"): [metrics.get(name, 0.0) for metrics in told] for name in names
        },
    )
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        write_atomically(out / "bench.json", json.dumps(asdict(found), indent=2))
        draw([span for step in spans[-_DRAWN:] for span in step], out / "timeline.svg", title)
    return found
