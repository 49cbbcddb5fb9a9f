"""A plan inside transformers' Trainer, which keeps its loop, its optimizer and its other callbacks."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import wraps
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from memo.config import Budget
from memo.planner.plan import Plan
from memo.profiler.autotune import autotune
from memo.report import TOO_LONG
from memo.runtime.run import Run, apply
from shared.errors import ConfigError
from shared.units import format_s

__all__ = ["MemoCallback", "is_larger"]

log = logging.getLogger(__name__)

_WARM_UP, _TIMED = 1, 3
"""Steps that are not compared with their prediction, as buffers are made in them, and steps that are."""


class MemoCallback(TrainerCallback):
    """Applies a plan from the Trainer's first step to its last.

    Gradient checkpointing stays off: the plan recomputes what pays. With a budget the plan is made when the model is
    called for the first time, with the batch that it is called with: nothing is drawn from the data's order. It is
    made again where a batch is larger than those before, and once where steps take far longer than predicted.

    Example: `Trainer(model, args, train_dataset=rows, callbacks=[MemoCallback(budget=budget)])`

    Attributes:
        plan: the one given, or chosen for the first batch.
        run: at work during training, and what it measured afterwards; None before.
    """

    def __init__(self, plan: Plan | None = None, *, budget: Budget | None = None) -> None:
        """Takes a plan, or a budget for which one is chosen.

        Args:
            plan: from `memo.autotune` or `Plan.fixed`.
            budget: hard limits; plans are made anew where the first batch is not the largest.

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
        self._planned: dict[str, tuple[int, ...]] = {}
        self._stop_listening: Callable[[], None] = lambda: None
        self._has_states = self._is_remade = False
        self._begun_s, self._step_s = 0.0, list[float]()

    run: Run | None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        """Applies the plan, or waits for the first batch where a budget was given.

        Raises:
            ConfigError: see `memo.apply`.
        """
        model: nn.Module = given["model"]
        self.close()  # the Trainer begins again where a batch did not fit (auto_find_batch_size)
        if self._budget is None:
            assert self.plan is not None
            self.run = apply(model, self.plan)
            return
        self._planned, self._has_states, self._is_remade = {}, False, False
        handle = model.register_forward_pre_hook(self._before_forward, with_kwargs=True)
        self._stop_listening = handle.remove

    def _before_forward(self, model: nn.Module, args: tuple[Any, ...], kwargs: Any) -> None:
        """Plans for a training batch that is larger than those before.

        Raises:
            DoesNotFit: no plan is within the budget.
            ConfigError: see `memo.apply`.
        """
        if not (model.training and torch.is_grad_enabled()):
            return
        batch = signature(model.forward).bind_partial(*args).arguments | kwargs
        shapes = {name: tuple(one.shape) for name, one in batch.items() if isinstance(one, Tensor)}
        if self._planned and not any(
            is_larger(shape, self._planned.get(name)) for name, shape in shapes.items()
        ):
            return
        assert self._budget is not None
        self.close()  # the model is called while it is measured
        self._planned, self._step_s = shapes, []
        try:
            self.plan = autotune(
                model, batch, self._budget, optimizer_bytes=0 if self._has_states else None
            )
        finally:
            handle = model.register_forward_pre_hook(self._before_forward, with_kwargs=True)
            self._stop_listening = handle.remove
        log.info("memo's plan:\n%s", self.plan.explain())
        self.run = apply(model, self.plan)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Begins to take a step's seconds."""
        self._begun_s = time.perf_counter()

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Compares the first steps' seconds with the prediction, and plans again where they take far longer."""
        self._has_states = True
        if self._budget is None or self.plan is None or len(self._step_s) >= _WARM_UP + _TIMED:
            return
        spent_s = time.perf_counter() - self._begun_s
        self._step_s.append(spent_s / args.gradient_accumulation_steps)
        predicted_s = self.plan.prediction["step_s"]
        if len(self._step_s) < _WARM_UP + _TIMED or self._is_remade:
            return
        # The quickest: what else runs on the machine only adds to a step.
        taken_s = min(self._step_s[_WARM_UP:])
        if taken_s > TOO_LONG * predicted_s:
            log.warning(
                "memo: expected steps of %s, got %s; planning once more with the next batch",
                format_s(predicted_s),
                format_s(taken_s),
            )
            self._is_remade, self._planned = True, {}

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Takes the plan off, and logs what was measured beside what was predicted."""
        if self.run is not None:
            log.info("memo's run:\n%s", self.run.report())
        self.close()

    def close(self) -> None:
        """Takes the plan off the model, and plans no more."""
        self._stop_listening()
        if self.run is not None:
            self.run.close()


def is_larger(shape: tuple[int, ...], planned: tuple[int, ...] | None) -> bool:
    """Whether a tensor of a batch has more numbers than the planned one, or longer rows with as many."""
    if planned is None or len(shape) != len(planned):
        return True
    size, most = torch.Size(shape).numel(), torch.Size(planned).numel()
    return size > most or (bool(shape) and size * shape[-1] > most * planned[-1])


def _closing(train: Callable[..., Any]) -> Callable[..., Any]:
    """`Trainer.train`, after which no model has a plan, also where it raised: the Trainer calls no callback then."""

    @wraps(train)
    def train_and_close(self: Trainer, *args: Any, **kwargs: Any) -> Any:
        try:
            return train(self, *args, **kwargs)
        finally:
            for callback in self.callback_handler.callbacks:
                if isinstance(callback, MemoCallback):
                    callback.close()

    return train_and_close


Trainer.train = _closing(Trainer.train)  # type: ignore[method-assign]
