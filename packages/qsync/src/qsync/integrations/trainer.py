"""A plan inside transformers' Trainer, which keeps its loop, its optimizer and its checkpoints."""

from typing import Any

from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from qsync.planner.plan import Plan
from qsync.runtime.apply import apply
from qsync.runtime.handshake import agree_on_model
from shared.comms.group import Group
from shared.errors import ConfigError

__all__ = ["QsyncCallback"]


class QsyncCallback(TrainerCallback):
    """Applies a plan from the Trainer's first step to its last; evaluations in between have it too.

    Checkpoints hold float32 masters. After training the model computes in float32 again.

    Example: `Trainer(model, args, train_dataset=rows, callbacks=[QsyncCallback(plan)])`
    """

    def __init__(self, plan: Plan) -> None:
        """Takes a plan for the model that the Trainer trains.

        Args:
            plan: from `qsync.plan`, a file or `Plan.uniform`.
        """
        self.plan = plan

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any
    ) -> None:
        """Applies the plan, and agrees on it with all ranks.

        Raises:
            ConfigError: see `qsync.apply` and `qsync.DDP`, the plan has fp16, for which the Trainer
                scales no loss, or the Trainer lowers by autocast what the plan keeps in float32.
        """
        model: nn.Module = others["model"]
        if args.bf16 or args.fp16:
            raise ConfigError(
                "TrainingArguments: expected neither bf16 nor fp16, whose autocast lowers what the "
                "plan keeps in float32; leave both out, the plan lowers the model"
            )
        _refuse_half(self.plan)
        apply(model, self.plan)
        if Group.exists():
            agree_on_model(model, Group.world().checked(), self.plan.fingerprint())

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any
    ) -> None:
        """Lets the model compute in float32 again."""
        apply(others["model"], Plan.uniform(others["model"], "fp32"))


def _refuse_half(plan: Plan) -> None:
    for rank, entry in enumerate(plan.ranks):
        for name, precision in entry.lowered.items():
            if precision == "fp16":
                raise ConfigError(
                    f"plan: expected precisions that need no loss scaling, got fp16 for {name!r} on "
                    f"rank {rank}; plan with bf16, or train by `qsync.DDP` and its `make_scaler`"
                )
