"""Training steps on documents of any length: every rank finishes at the same time.

A step's documents are planned over the ranks: over as many as each needs under DDP or FSDP2 (`degrees`),
or over unequal replicas whose optimizer states lie sharded over all ranks (`replicas`). The loss is the
number that one process would compute: summed over all tokens of the step, divided once.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from hydraulis.config import Cost, check_cost, check_count
from hydraulis.planner.proposals import Candidate
from hydraulis.planner.replicas import MovedBytes, ReplicaPlan, read_strategy
from hydraulis.planner.schedule import StepPlan
from hydraulis.runtime.agreement import check_agreed
from hydraulis.runtime.attention import check_isolation
from hydraulis.runtime.degrees import DegreeRunner, read_degree
from hydraulis.runtime.loss import check_family
from hydraulis.runtime.records import StepRecord, TrainingReport
from hydraulis.runtime.replicas import ReplicaRunner
from hydraulis.runtime.steps import PlannedStep, to_tokens
from shared.comms import Group, all_gather, all_reduce
from shared.errors import ConfigError, DataError
from shared.training import check_loss

__all__ = ["Engine", "PlannedStep", "StepResult"]

log = logging.getLogger(__name__)

_MOST_LOWERED = 3


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What came of a step, the same on all ranks.

    Attributes:
        loss: sum of next-token losses over their number, of all documents; 0 where no document has a
            next token, and then no parameter changes.
        num_losses: next tokens that were learned.
        seconds: of the step on this rank.
        grad_norm: 2-norm of all gradients before they were clipped; None without `max_grad_norm`.
    """

    loss: float
    num_losses: int
    seconds: float
    grad_norm: float | None = None


class Engine:
    """Trains a Hugging Face causal LM on the ranks of the world.

    Attributes:
        group: all ranks; None in one process without others.
        num_ranks: of the world.
        rank: this one's.
        model: as given. With replicas its parameters are DTensors, sharded along their first dimension
            over all ranks, from which every step takes what it computes with.
        optimizer: of its parameters.
        num_lowered: times that memory ran out and the ranks' tokens were lowered by a tenth.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer],
        *,
        max_tokens: int,
        cost: Cost | None = None,
        message_s: float = 0.0,
        strategy: str | None = None,
        candidates: Sequence[Candidate] | None = None,
        max_grad_norm: float | None = None,
    ) -> None:
        """Takes the model as it is; every rank makes an engine alike.

        Args:
            model: the same on every rank, or sharded by FSDP2 (`fully_shard`) already. A plain one is
                wrapped in DistributedDataParallel, or sharded where replicas run; either takes rank
                0's weights.
            optimizer: makes an optimizer of parameters: `partial(torch.optim.AdamW, lr=3e-4)`.
            max_tokens: most tokens that a rank holds at once. Tensor-parallel ranks hold the same ones.
            cost: seconds of a micro-batch on one rank; from the model's shape by default, see
                `measure_cost`.
            message_s: seconds of messages for each token of a document that lies over several ranks.
            strategy: "cp4" puts every document over four ranks under DDP or FSDP2; "tp2pp2+tp1+ring2"
                runs these replicas, on consecutive ranks. By default degrees follow documents.
            candidates: sets of replicas, as `propose` finds them: each step runs the one that is
                fastest for its documents. Their caps hold as far as `max_tokens` allows.
            max_grad_norm: 2-norm to which a step's gradients are clipped; `inf` only measures it.

        Raises:
            ConfigError: max_tokens below 1, an optimizer that is made already, a norm that is not above 0,
                a strategy that the ranks cannot be cut into, both a strategy and candidates, no candidate
                that can run, a cost that was measured on another kind of device, or a model whose loss is
                not a plain product's.
            CommError: ranks were given unlike arguments; names them.
        """
        check_count("max_tokens", max_tokens)
        check_cost(cost)
        if max_grad_norm is not None and not max_grad_norm > 0:
            raise ConfigError(f"max_grad_norm: expected more than 0, got {max_grad_norm}")
        if isinstance(optimizer, torch.optim.Optimizer):
            raise ConfigError(
                f"optimizer: expected what makes one, as partial(torch.optim.AdamW, lr=3e-4), got a made "
                f"{type(optimizer).__name__}; the engine may shard the parameters first"
            )
        if strategy is not None and candidates is not None:
            raise ConfigError(
                f"expected a strategy or candidates, got {strategy!r} and {len(candidates)}; the "
                f"strategy would be the only candidate"
            )
        self.group = Group.world() if Group.exists() else None
        self.num_ranks = 1 if self.group is None else self.group.world_size
        self.rank = 0 if self.group is None else self.group.rank
        self.model = model
        config = _config(model)
        cost = Cost.of_model(config) if cost is None else cost
        cost.check_device(next(model.parameters()).device)
        # Before the ranks make groups, in which those that disagree would wait for one another.
        sets = [one.shapes for one in candidates or ()]
        problem = None
        try:
            check_family(model)
            self._limits = check_isolation(model, is_engine=True)
        except ConfigError as error:
            problem = error
        check_agreed(
            self.group, "engine: expected the same arguments",
            repr((max_tokens, cost, message_s, strategy, sets, max_grad_norm)),
            "give all ranks the same max_tokens, cost, strategy and candidates", problem=problem,
        )  # fmt: skip
        degree = None if strategy is None else read_degree(strategy, self.num_ranks)
        self._runner: DegreeRunner | ReplicaRunner
        if candidates is None and (strategy is None or degree is not None):
            self._runner = DegreeRunner(
                model, self.group, cost=cost, max_tokens=max_tokens, message_s=message_s,
                degree=degree,
            )  # fmt: skip
        else:
            if strategy is not None:
                layers = config.num_hidden_layers
                fixed = read_strategy(
                    strategy, cost=cost, max_tokens=max_tokens, num_layers=layers,
                    message_s=message_s,
                )  # fmt: skip
                sets = [fixed]
            self._runner = ReplicaRunner(model, self.group, sets, max_tokens=max_tokens)
        self.num_lowered = 0
        self._max_grad_norm, self._vocab_size = max_grad_norm, config.vocab_size
        self.optimizer = optimizer([p for p in model.parameters() if p.requires_grad])
        self._records: list[StepRecord] = []

    @property
    def max_document(self) -> int:
        """Tokens of the longest document that can be trained on."""
        return self._runner.max_document

    def plan(self, lengths: Sequence[int] | np.ndarray) -> StepPlan | ReplicaPlan:
        """Plans a step of documents of these lengths; every rank finds the same.

        Raises:
            SequenceTooLong: a document exceeds what all ranks hold together.
            ConfigError: a document is longer than the model computes packed as alone.
        """
        plan = self._runner.plan(lengths)
        self.check_longest(max(plan.lengths))
        return plan

    def check_longest(self, num_tokens: int) -> None:
        """Refuses documents that are longer than the model computes packed as alone.

        Raises:
            ConfigError: a sliding window or rotary angles that depend on the longest document.
        """
        self._limits.check(num_tokens)

    def step(self, step: PlannedStep | Sequence[Any]) -> StepResult:
        """Computes a step's gradients and updates the parameters; every rank calls it alike.

        Args:
            step: of a `StepLoader`, or documents as 1-D tensors of token ids, the same on every rank.

        Raises:
            SequenceTooLong: a document exceeds what all ranks hold together.
            CommError: ranks disagree on the plan or one of them cannot read its documents, before anything
                is computed; or one died.
            DataError: this rank cannot read its documents, see `PlannedStep.tokens`.
            DivergenceError: the loss is NaN or infinite, on every rank; parameters are as they were.
            ConfigError: memory ran out again and again, though with fewer tokens each time.
            torch.OutOfMemoryError: memory ran out where other ranks wait; see `DegreeRunner.compute`.
        """
        step = self._planned(step)
        begun = time.perf_counter()
        step = self._read(step)
        num_losses = sum(length - 1 for length in step.plan.lengths)
        if not num_losses:
            return StepResult(
                loss=0.0, num_losses=0, seconds=time.perf_counter() - begun,
                grad_norm=None if self._max_grad_norm is None else 0.0,
            )  # fmt: skip
        agreed_s = time.perf_counter()
        total, ended_s = self._runner.compute(step, num_losses)
        # Before the update: a rank that is lost until here leaves all parameters as they were.
        is_short = isinstance(self._runner, DegreeRunner) and self._runner.is_short
        told = torch.stack((total, total.new_tensor(float(is_short))))
        if self.group is not None:
            all_reduce(self.group, told)
        total, num_short = told
        if num_short and isinstance(self._runner, DegreeRunner):
            self._lower_cap(self._runner)
            return self.step(step)
        check_loss(float(total), f"step {len(self._records) + 1}")
        grad_norm = self._clip()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        done_s = time.perf_counter()
        self._records.append(
            StepRecord(
                planned_s=step.plan.makespan_s, planned_busy_s=float(step.plan.seconds[self.rank]),
                gap=step.plan.gap, busy_s=ended_s - agreed_s, seconds=done_s - agreed_s,
                is_late=step.is_late,
            )
        )  # fmt: skip
        return StepResult(
            loss=float(total), num_losses=num_losses, seconds=done_s - begun, grad_norm=grad_norm
        )

    def evaluate(self, step: PlannedStep | Sequence[Any]) -> float:
        """The loss of documents, of which nothing is learned; every rank calls it alike.

        Args:
            step: as of `step`.

        Returns:
            Sum of next-token losses over their number, the same on all ranks; 0 without a next token.

        Raises:
            SequenceTooLong: a document exceeds what all ranks hold together.
            CommError: as of `step`.
            DataError: as of `step`.
        """
        step = self._read(self._planned(step))
        num_losses = sum(length - 1 for length in step.plan.lengths)
        if not num_losses:
            return 0.0
        total = self._runner.evaluate(step, num_losses)
        return float(total if self.group is None else all_reduce(self.group, total))

    def _planned(self, step: PlannedStep | Sequence[Any]) -> PlannedStep:
        """A step with a plan that keeps within the present cap."""
        if not isinstance(step, PlannedStep):
            if not len(step):
                raise DataError("step: expected at least one document, got none")
            lengths = [len(to_tokens(one, number)) for number, one in enumerate(step)]
            step = PlannedStep(
                documents=step, indices=tuple(range(len(step))), plan=self.plan(lengths)
            )
        elif isinstance(self._runner, DegreeRunner) and not self._runner.holds(step.plan):
            step = step.planned_anew(self.plan, self.max_document)
        return replace(step, vocab_size=self._vocab_size)

    def _read(self, step: PlannedStep) -> PlannedStep:
        """A step with this rank's documents, once all ranks have theirs and one plan."""
        texts, problem = {}, None
        try:
            texts = {place: step.tokens(place) for place in self._runner.places(step.plan)}
        except Exception as error:  # noqa: BLE001 - raised as soon as the other ranks know
            problem = error
        check_agreed(
            self.group,
            f"step {step.number} of epoch {step.epoch}: expected one plan and its documents",
            f"{step.plan.digest} {step.indices} {step.epoch} {step.number}",
            "give all ranks the same documents, max_tokens, cost and seed", problem=problem,
        )  # fmt: skip
        return replace(step, texts=texts)

    def _clip(self) -> float | None:
        """Clips gradients; their norm before, over all ranks."""
        if self._max_grad_norm is None:
            return None
        known = [p for group in self.optimizer.param_groups for p in group["params"]]
        norm: Any = nn.utils.clip_grad_norm_(known, self._max_grad_norm)
        return float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)

    def _lower_cap(self, runner: DegreeRunner) -> None:
        """Gives up the step's gradients and lowers the cap, on all ranks alike."""
        self.optimizer.zero_grad(set_to_none=True)
        before = runner.cap
        self.num_lowered += 1
        if self.num_lowered > _MOST_LOWERED:
            raise ConfigError(
                f"max_tokens: memory ran out {self.num_lowered} times, at last with {before} tokens a rank; "
                f"start again with fewer, or shard the model by FSDP2"
            )
        runner.lower_cap()
        if self.rank:
            return
        log.warning(
            "memory ran out with %d tokens a rank: this step is computed anew, and all further ones, with "
            "at most %d; set max_tokens to that", before, runner.cap,
        )  # fmt: skip

    def report(self) -> TrainingReport:
        """Idle share by rank, planned beside measured, and gap to the bound; every rank calls it."""
        mine = torch.tensor(
            [sum(one.busy_s for one in self._records), sum(one.seconds for one in self._records)],
            dtype=torch.float64,
        )
        every = [mine]
        if self.group is not None and self.num_ranks > 1:
            every = [one.cpu() for one in all_gather(self.group, mine.to(self.group.device))]
        return TrainingReport(
            records=tuple(self._records),
            idle_shares=tuple(float(1 - busy / max(spent, 1e-12)) for busy, spent in every),
        )

    def state_dict(self) -> dict[str, Tensor]:
        """All parameters and buffers, whole, under Hugging Face's names, on every rank."""
        found = self.model.state_dict()
        return {
            name: value.full_tensor() if hasattr(value, "full_tensor") else value
            for name, value in found.items()
        }

    def sharded_state_dict(self) -> dict[str, Any]:
        """The training state as `torch.distributed.checkpoint` saves it; every rank calls it.

        Returns:
            "model" and "optimizer", both by Hugging Face's names; with replicas or FSDP2 as DTensors,
            of which every rank holds its shards.
        """
        of_model, of_optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": of_model, "optimizer": of_optimizer}

    def load_sharded_state_dict(self, state: dict[str, Any]) -> None:
        """Takes a state over that was loaded into one of `sharded_state_dict`; every rank calls it.

        `torch.distributed.checkpoint.load` fills it from files of any number of ranks.
        """
        set_state_dict(
            self.model, self.optimizer,
            model_state_dict=state["model"], optim_state_dict=state["optimizer"],
        )  # fmt: skip

    def moved_bytes(self, plan: StepPlan | ReplicaPlan) -> MovedBytes:
        """Bytes that a step's change of layout sends, by rank; none where parameters stay."""
        if isinstance(self._runner, DegreeRunner) or isinstance(plan, StepPlan):
            return MovedBytes(parameters=(0,) * self.num_ranks, gradients=(0,) * self.num_ranks)
        return self._runner.moved_bytes(plan)


def _config(model: Any) -> Any:
    if not hasattr(model, "config") and hasattr(model, "module"):
        raise ConfigError(
            f"expected the model itself, got it in {type(model).__name__}; give the engine what was wrapped"
        )
    if not hasattr(model, "config"):
        raise ConfigError(
            f"expected a Hugging Face causal LM, got {type(model).__name__}; with another model keep "
            f"your own loop, and take BalancedBatchSampler"
        )
    return model.config
