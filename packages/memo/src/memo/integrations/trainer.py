"""A plan inside transformers' Trainer, which keeps its loop, its optimizer and its other callbacks."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from memo.config import Budget
from memo.planner.plan import Plan
from memo.profiler.autotune import autotune
from memo.runtime.layers import device_of
from memo.runtime.run import Run, apply
from shared.errors import ConfigError

__all__ = ["MemoCallback"]

log = logging.getLogger(__name__)


class MemoCallback(TrainerCallback):
    """Applies a plan from the Trainer's first step to its last.

    Gradient checkpointing stays off: the plan recomputes what pays.

    Example: `Trainer(model, args, train_dataset=rows, callbacks=[MemoCallback(budget=budget)])`

    Attributes:
        plan: the one given, or chosen for the first batch.
        run: at work during training, and what it measured afterwards; None before.
    """

    def __init__(self, plan: Plan | None = None, *, budget: Budget | None = None) -> None:
        """Takes a plan, or a budget for which one is chosen.

        Args:
            plan: from `memo.autotune` or `Plan.fixed`.
            budget: hard limits; the first batch of the training set should be of the longest length.

        Raises:
            ConfigError: neither or both are given.
        """
        if (plan is None) == (budget is None):
            raise ConfigError(
                "MemoCallback: expected a plan or a budget, got "
                + ("neither" if plan is None else "both")
            )
        self.plan, self.run = plan, None
        self._budget = budget

    run: Run | None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        """Applies the plan, chosen for the first training batch where a budget was given.

        Raises:
            DoesNotFit: no plan is within the budget.
            ConfigError: see `memo.apply`.
        """
        model: nn.Module = given["model"]
        if self.plan is None:
            assert self._budget is not None
            batch = _first_batch(given["train_dataloader"], model)
            self.plan = autotune(model, batch, self._budget)
            log.info("memo's plan:\n%s", self.plan.explain())
        self.run = apply(model, self.plan)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Takes the plan off, and logs what was measured beside what was predicted."""
        if self.run is not None:
            log.info("memo's run:\n%s", self.run.report())
            self.run.close()


def _first_batch(loader: DataLoader, model: nn.Module) -> Mapping[str, Any]:
    """The first batch as the Trainer gives it to the model, without drawing from the training's order."""
    device = device_of(model)
    batch: Mapping[str, Any] = next(iter(loader))
    return {key: one.to(device) if isinstance(one, Tensor) else one for key, one in batch.items()}
