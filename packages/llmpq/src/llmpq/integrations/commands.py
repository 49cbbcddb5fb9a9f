"""Subcommand that hands a plan to another engine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from llmpq.checks import check_output
from llmpq.integrations import EXPORTS, SUFFIXES, export
from shared.cli import JsonOption, choice
from shared.errors import ConfigError

if TYPE_CHECKING:
    from llmpq.planner.plan import Plan

__all__ = ["ExportPlan", "find_model"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportPlan(JsonOption):
    """Write a plan for another engine: a folder it loads, or the settings it takes.

    Examples:
        llmpq export report/llmpq/plan.json --to compressed-tensors
        llmpq export report/llmpq/plan.json --to vllm --out served
    """

    plan: tyro.conf.Positional[Path]
    """The plan."""
    to: Annotated[str, choice(EXPORTS)]
    """The engine."""
    model: Path | None = None
    """Folder of the Hugging Face model; the one that was planned for by default."""
    out: Path | None = None
    """Folder, or for settings alone the file; beside the plan by default, named after both."""

    def execute(self) -> None:
        """Writes it and says how to use it."""
        from llmpq.planner.plan import Plan

        plan = Plan.load(self.plan)
        name = f"{self.plan.stem}-{self.to}{SUFFIXES.get(self.to, '')}"
        out = self.out or self.plan.with_name(name)
        check_output(
            "out",
            out if self.to in SUFFIXES else out.absolute().parent,
            is_folder=self.to not in SUFFIXES,
        )
        lines = export(plan, self.to, find_model(plan, self.plan, self.model), out)
        self.print_result({"out": str(out), "lines": lines}, "\n".join(lines))


def find_model(plan: Plan, path: Path, given: Path | None) -> Path:
    """Finds the folder of a plan's model: the one that was given, or else the one planned for.

    Args:
        plan: the plan.
        path: its file, for errors.
        given: the folder that the user gave.

    Raises:
        ConfigError: neither names a folder.
    """
    folder = given or plan.folder
    if folder is None:
        raise ConfigError(f"{path}: expected the plan to name its model's folder; give --model")
    return Path(folder)
