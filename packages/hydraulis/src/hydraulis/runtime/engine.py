"""Training steps on documents of any length: every rank finishes at the same time.

A step's documents are planned over the ranks: short ones are packed, each rank its own; a long one gets
as many ranks as it needs, for that micro-batch only, by ring attention. Parameters stay as they are, so
that degrees change for nothing. The loss is the number that one process would compute: summed over all
tokens of the step, divided once.
"""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hydraulis.config import Cost
from hydraulis.planner.degrees import DegreeCost
from hydraulis.planner.schedule import MicroBatch, StepPlan, plan_step
from hydraulis.runtime.attention import PackedDocuments
from hydraulis.runtime.loss import NO_LABEL, LossModel
from hydraulis.runtime.records import StepRecord, TrainingReport
from shared.comms import Group, all_gather, all_reduce
from shared.comms.collectives import bucket_sum
from shared.errors import CommError, ConfigError, DataError

__all__ = ["Engine", "PlannedStep", "StepResult"]


@dataclass(frozen=True, kw_only=True, eq=False)
class PlannedStep:
    """A step's documents and who computes them.

    Attributes:
        documents: all documents; those of the step are read.
        indices: numbers of the step's documents.
        plan: of the step; its documents are places in `indices`.
        epoch: number of the pass over all documents, from 0.
        number: of the step in its epoch, from 0.
    """

    documents: Sequence[Any]
    indices: tuple[int, ...]
    plan: StepPlan
    epoch: int = 0
    number: int = 0

    def tokens(self, place: int) -> Tensor:
        """Token ids of a document of the step [tokens]."""
        return _to_tokens(self.documents[self.indices[place]])[: self.plan.lengths[place]]


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What came of a step, the same on all ranks.

    Attributes:
        loss: sum of next-token losses over their number, of all documents; 0 where no document has a
            next token, and then no parameter changes.
        num_losses: next tokens that were learned.
        seconds: of the step on this rank.
    """

    loss: float
    num_losses: int
    seconds: float


class Engine:
    """Trains a Hugging Face causal LM on the ranks of the world, with DDP or FSDP2."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer],
        *,
        max_tokens: int,
        cost: Cost | None = None,
        message_s: float = 0.0,
        strategy: str | None = None,
    ) -> None:
        """Takes the model as it is; every rank makes an engine alike.

        Args:
            model: the same on every rank, or sharded by FSDP2 (`fully_shard`) already. A plain one is
                wrapped in DistributedDataParallel, which takes rank 0's weights.
            optimizer: makes an optimizer of parameters: `partial(torch.optim.AdamW, lr=3e-4)`.
            max_tokens: most tokens that a rank holds at once.
            cost: seconds of a micro-batch; from the model's shape by default, see `measure_cost`.
            message_s: seconds of messages for each token of a document that lies over several ranks.
            strategy: "cp4" puts every document over four ranks; by default degrees follow documents.

        Raises:
            ConfigError: max_tokens below 1, a strategy that the ranks cannot be cut into, or a model
                whose loss is not a plain product's.
        """
        if max_tokens < 1:
            raise ConfigError(f"max_tokens: expected at least 1, got {max_tokens}")
        self.group = Group.world() if Group.exists() else None
        self.num_ranks = 1 if self.group is None else self.group.world_size
        self.rank = 0 if self.group is None else self.group.rank
        self.is_sharded = hasattr(model, "set_requires_gradient_sync")
        self.sync = "micro-batch" if self.is_sharded else "step"
        degree = _read_strategy(strategy, self.num_ranks)
        least = {} if degree is None else {"min_degree": degree, "max_degree": degree}
        self.cost = DegreeCost(
            cost=Cost.of_model(_config(model)) if cost is None else cost,
            cap=max_tokens,
            message_s={2**power: message_s for power in range(1, 24)},
            **least,
        )
        self.model = model
        self._loss = LossModel(model, is_sharded=self.is_sharded)
        self._ready_s = 0.0
        self._groups = self._make_groups()
        self._runner: nn.Module = self._loss
        if self.group is not None and self.num_ranks > 1 and not self.is_sharded:
            self._runner = DistributedDataParallel(
                self._loss, process_group=self.group.process_group, gradient_as_bucket_view=True
            )
            self._runner.register_comm_hook(None, bucket_sum(self.group, self._note_ready))
        self.optimizer = optimizer([p for p in model.parameters() if p.requires_grad])
        self._records: list[StepRecord] = []

    def plan(self, lengths: Sequence[int] | np.ndarray) -> StepPlan:
        """Plans a step of documents of these lengths; every rank finds the same."""
        return plan_step(lengths, self.num_ranks, self.cost, self.sync)

    def step(self, step: PlannedStep | Sequence[Any]) -> StepResult:
        """Computes a step's gradients and updates the parameters; every rank calls it alike.

        Args:
            step: of a `StepLoader`, or documents as 1-D tensors of token ids, the same on every rank.

        Raises:
            SequenceTooLong: a document exceeds what all ranks hold together.
            CommError: ranks disagree on the plan, before anything is computed, or one died.
        """
        if not isinstance(step, PlannedStep):
            if not len(step):
                raise DataError("step: expected at least one document, got none")
            lengths = [len(_to_tokens(one)) for one in step]
            step = PlannedStep(
                documents=step, indices=tuple(range(len(step))), plan=self.plan(lengths)
            )
        begun = time.perf_counter()
        self._check_agreed(step)
        num_losses = sum(length - 1 for length in step.plan.lengths)
        if not num_losses:
            return StepResult(loss=0.0, num_losses=0, seconds=time.perf_counter() - begun)
        agreed_s = time.perf_counter()
        total = self._compute(step, num_losses)
        ended_s = self._ready_s or time.perf_counter()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.group is not None:
            all_reduce(self.group, total)
        done_s = time.perf_counter()
        self._records.append(
            StepRecord(
                planned_s=step.plan.makespan_s, planned_busy_s=float(step.plan.seconds[self.rank]),
                gap=step.plan.gap, busy_s=ended_s - agreed_s, seconds=done_s - agreed_s,
            )
        )  # fmt: skip
        return StepResult(loss=float(total), num_losses=num_losses, seconds=done_s - begun)

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

    def _make_groups(self) -> dict[tuple[int, int], Group]:
        """This rank's group of each degree, by degree and first rank; all ranks make all of them."""
        found = {}
        for degree in self.cost.degrees(self.num_ranks).tolist():
            if degree == 1:
                continue
            for first in range(0, self.num_ranks // degree * degree, degree):
                made = Group.of(range(first, first + degree))
                if made.rank >= 0:
                    found[degree, first] = made
        return found

    def _check_agreed(self, step: PlannedStep) -> None:
        """Compares plans before anything is computed: ranks that disagree would wait for each other."""
        if self.group is None or self.num_ranks == 1:
            return
        text = f"{step.plan.digest} {step.indices} {step.epoch} {step.number}"
        mine = torch.tensor([_number(text)], dtype=torch.int64, device=self.group.device)
        every = [int(one) for one in all_gather(self.group, mine)]
        other = [rank for rank, one in enumerate(every) if one != every[0]]
        if other:
            raise CommError(
                f"step {step.number} of epoch {step.epoch}: expected one plan on all ranks, but "
                f"ranks {other} have another one than rank 0; give all ranks the same documents, "
                f"max_tokens, cost and seed"
            )

    def _compute(self, step: PlannedStep, num_losses: int) -> Tensor:
        """Runs this rank's micro-batches; gradients are summed over ranks with the last one."""
        device = next(self.model.parameters()).device
        queue = step.plan.micro_batches[self.rank]
        # FSDP averages gradients over ranks, our hook sums them.
        scale = (self.num_ranks if self.is_sharded else 1) / num_losses
        total = torch.zeros((), dtype=torch.float64, device=device)
        self._ready_s = 0.0
        for at, micro_batch in enumerate(queue):
            is_last = at + 1 == len(queue)
            with self._synchronised(is_last=is_last):
                loss = self._runner(*self._inputs(step, micro_batch, device))
                total += loss.detach() / num_losses
                (loss * scale).backward()
        return total

    def _synchronised(self, *, is_last: bool) -> Any:
        """Leaves gradients to this rank alone until its last micro-batch."""
        if self.is_sharded:
            model: Any = self.model
            model.set_requires_gradient_sync(is_last)
        elif isinstance(self._runner, DistributedDataParallel) and not is_last:
            return self._runner.no_sync()
        return nullcontext()

    def _inputs(
        self, step: PlannedStep, micro_batch: MicroBatch, device: torch.device
    ) -> tuple[Tensor, Tensor, Tensor, PackedDocuments]:
        """This rank's tokens of a micro-batch, their places and labels."""
        texts = [step.tokens(place) for place in micro_batch.documents]
        labels = [torch.cat((ids[1:], ids.new_full((1,), NO_LABEL))) for ids in texts]
        # Tokens that nothing is learned of, where a rank would have none: all have to take part.
        if max(map(len, texts), default=0) < 2 * micro_batch.degree:
            texts.append(torch.zeros(2 * micro_batch.degree, dtype=torch.int64))
            labels.append(torch.full_like(texts[-1], NO_LABEL))
        ring = self._groups.get((micro_batch.degree, micro_batch.first))
        packing = PackedDocuments(lengths=tuple(map(len, texts)), ring=ring)
        local = packing.tokens()
        parts = torch.cat(texts), packing.positions(), torch.cat(labels)
        ids, positions, learned = (one[local].to(device) for one in parts)
        return ids, positions, learned, packing

    def _note_ready(self) -> None:
        self._ready_s = time.perf_counter()


def _to_tokens(document: Any) -> Tensor:
    """Token ids of a document: a 1-D tensor or array, a list of numbers, or bytes."""
    if isinstance(document, bytes):
        return torch.frombuffer(bytearray(document), dtype=torch.uint8).long()
    found = torch.as_tensor(document)
    if found.ndim != 1 or found.dtype.is_floating_point or found.dtype.is_complex:
        raise DataError(
            f"expected a document as one row of token ids, got {list(found.shape)} of {found.dtype}"
        )
    return found.long().cpu()


def _config(model: Any) -> Any:
    if not hasattr(model, "config"):
        raise ConfigError(
            f"expected a Hugging Face causal LM, got {type(model).__name__}; with another model keep "
            f"your own loop, and take BalancedBatchSampler"
        )
    return model.config


def _read_strategy(strategy: str | None, num_ranks: int) -> int | None:
    """The degree of context parallelism that a strategy fixes."""
    if strategy is None:
        return None
    found = re.fullmatch(r"cp(\d+)", strategy)
    degree = int(found[1]) if found else 0
    if degree < 1 or degree & (degree - 1) or num_ranks % degree:
        raise ConfigError(
            f"strategy: expected cp and a power of two that divides {num_ranks} ranks, got "
            f"{strategy!r}"
        )
    return degree


def _number(text: str) -> int:
    """63 bits of a text, the same in every process."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1
