"""Steps whose documents lie over as many ranks as they need, under DDP or FSDP2.

Short documents are packed, each rank its own; a long one gets several ranks, for that micro-batch only,
by ring attention. Parameters stay as they are, so that degrees change for nothing.
"""

from __future__ import annotations

import re
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hydraulis.config import Cost
from hydraulis.planner.degrees import DegreeCost
from hydraulis.planner.replicas import ReplicaPlan
from hydraulis.planner.schedule import MicroBatch, StepPlan, plan_step
from hydraulis.runtime.attention import attend
from hydraulis.runtime.loss import LossModel
from hydraulis.runtime.steps import PlannedStep, make_row
from shared.comms import Group
from shared.comms.collectives import bucket_sum
from shared.errors import ConfigError

__all__ = ["DegreeRunner", "read_degree"]

_LOWERED = 0.9
"""Share of the tokens that a rank may hold, after memory ran out."""


class DegreeRunner:
    """Plans and computes steps on ranks that each hold the model, whole or sharded by FSDP2.

    Attributes:
        is_short: whether this rank ran out of memory in the last step, whose gradients are then worthless.
    """

    def __init__(
        self,
        model: nn.Module,
        group: Group | None,
        *,
        cost: Cost,
        max_tokens: int,
        message_s: float,
        degree: int | None,
    ) -> None:
        """Wraps a plain model in DistributedDataParallel; every rank calls it alike.

        Args:
            model: a Hugging Face causal LM.
            group: all ranks; None for one.
            cost: seconds of a micro-batch.
            max_tokens: most tokens that a rank holds at once.
            message_s: seconds of messages for each token of a document that lies over several ranks.
            degree: ranks of every document; None lets them follow documents.

        Raises:
            ConfigError: a model whose loss is not a plain product's.
        """
        self._model, self._group = model, group
        self._num_ranks = 1 if group is None else group.world_size
        self._rank = 0 if group is None else group.rank
        self._is_sharded = hasattr(model, "set_requires_gradient_sync")
        least = {} if degree is None else {"min_degree": degree, "max_degree": degree}
        self._cost = DegreeCost(
            cost=cost,
            cap=max_tokens,
            message_s={2**power: message_s for power in range(1, 24)},
            **least,
        )
        self.is_short = False
        self._ready_s = 0.0
        self._groups = self._make_groups()
        loss = LossModel(model, is_sharded=self._is_sharded)
        self._own_loss = loss
        self._loss: nn.Module = loss
        if group is not None and self._num_ranks > 1 and not self._is_sharded:
            # Buffers hold what positions alone decide, so nobody needs another rank's.
            with warnings.catch_warnings():
                # The argument that takes its place is not known before torch 2.13.
                warnings.filterwarnings("ignore", "`broadcast_buffers`", FutureWarning)
                wrapped = DistributedDataParallel(
                    loss, process_group=group.process_group, gradient_as_bucket_view=True,
                    broadcast_buffers=False,
                )  # fmt: skip
            self._loss = wrapped
            wrapped.register_comm_hook(None, bucket_sum(group, self._note_ready))

    @property
    def _device(self) -> torch.device:
        return next(self._model.parameters()).device

    @property
    def cap(self) -> int:
        """Most tokens that a rank holds at once."""
        return self._cost.cap

    @property
    def max_document(self) -> int:
        """Tokens of the longest document that all ranks hold together."""
        return int(self._cost.degrees(self._num_ranks)[-1]) * self.cap

    def holds(self, plan: StepPlan | ReplicaPlan) -> bool:
        """Whether a plan keeps within the cap, which may have been lowered since it was made."""
        assert isinstance(plan, StepPlan), "planned here"
        return all(
            sum(plan.lengths[place] for place in one.documents) <= self.cap * one.degree
            for queue in plan.micro_batches
            for one in queue
        )

    def lower_cap(self) -> None:
        """Plans with a tenth fewer tokens a rank from now on."""
        self._cost = replace(self._cost, cap=max(int(_LOWERED * self.cap), 1))

    def plan(self, lengths: Sequence[int] | np.ndarray) -> StepPlan:
        """Plans a step of documents of these lengths."""
        sync = "micro-batch" if self._is_sharded else "step"
        return plan_step(lengths, self._num_ranks, self._cost, sync)

    def places(self, plan: StepPlan | ReplicaPlan) -> list[int]:
        """Places of the documents that this rank reads of a step."""
        assert isinstance(plan, StepPlan), "planned here"
        return [place for one in plan.micro_batches[self._rank] for place in one.documents]

    def compute(self, step: PlannedStep, num_losses: int) -> tuple[Tensor, float]:
        """Runs this rank's micro-batches; gradients are summed over ranks with the last one.

        Where memory runs out in a micro-batch of this rank alone, it takes part in what all ranks do
        without its other documents, so that none waits for it; `is_short` tells.

        Args:
            step: planned here.
            num_losses: next tokens of the whole step, by which losses are divided.

        Returns:
            This rank's share of the loss, and the time at which its own gradients were complete.

        Raises:
            torch.OutOfMemoryError: memory runs out where other ranks compute the same micro-batch, or
                wait for its gradients already.
        """
        assert isinstance(step.plan, StepPlan), "planned here"
        queue = step.plan.micro_batches[self._rank]
        # FSDP averages gradients over ranks, our hook sums them.
        scale = (self._num_ranks if self._is_sharded else 1) / num_losses
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        self.is_short, self._ready_s = False, 0.0
        for at, one in enumerate(queue):
            is_last = at + 1 == len(queue)
            if self.is_short and not is_last:
                continue
            with (
                attend(self._model),
                self._synchronised(is_last=is_last),
                self._telling(step, one),
            ):
                loss = self._forward(step, one)
                total += loss.detach() / num_losses
                try:
                    (loss * scale).backward()
                except torch.OutOfMemoryError:
                    if is_last or not self._is_alone(one):
                        raise
                    self.is_short = True
        return total, self._ready_s or time.perf_counter()

    @torch.no_grad()
    def evaluate(self, step: PlannedStep, num_losses: int) -> Tensor:
        """This rank's share of a step's loss, without gradients; arguments as of `compute`."""
        assert isinstance(step.plan, StepPlan), "planned here"
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        for one in step.plan.micro_batches[self._rank]:
            ring = self._groups.get((one.degree, one.first))
            row = make_row(step, one.documents, self._device, ring=ring)
            with attend(self._model), self._telling(step, one):
                total += self._own_loss(row.ids, row.positions, row.labels, row.packing)
        return total / num_losses

    def _forward(self, step: PlannedStep, one: MicroBatch) -> Tensor:
        """A micro-batch's loss; that of two tokens without labels where memory is short."""
        ring = self._groups.get((one.degree, one.first))
        if not self.is_short:
            row = make_row(step, one.documents, self._device, ring=ring)
            try:
                return self._loss(row.ids, row.positions, row.labels, row.packing)
            except torch.OutOfMemoryError:
                if not self._is_alone(one):
                    raise
                self.is_short = True
        row = make_row(step, (), self._device)
        return self._loss(row.ids, row.positions, row.labels, row.packing)

    def _is_alone(self, one: MicroBatch) -> bool:
        """Whether no other rank takes part in a micro-batch's passes."""
        return one.degree == 1 and not self._is_sharded

    @contextmanager
    def _telling(self, step: PlannedStep, one: MicroBatch) -> Iterator[None]:
        """Says of an error of memory which micro-batch it was, and what to do."""
        try:
            yield
        except torch.OutOfMemoryError as error:
            tokens = sum(step.plan.lengths[place] for place in one.documents)
            layers = ", under FSDP2 in every layer, so that it cannot be planned anew"
            error.add_note(
                f"in a micro-batch of {tokens} tokens over {one.degree} ranks, where others wait for this "
                f"one{layers if self._is_sharded else ''}; start again with max_tokens below {self.cap}"
            )
            raise

    def _make_groups(self) -> dict[tuple[int, int], Group]:
        """This rank's group of each degree, by degree and first rank; all ranks make all of them."""
        found = {}
        for degree in self._cost.degrees(self._num_ranks).tolist():
            if degree == 1:
                continue
            for first in range(0, self._num_ranks // degree * degree, degree):
                made = Group.of(range(first, first + degree))
                if made.rank >= 0:
                    found[degree, first] = made
        return found

    def _synchronised(self, *, is_last: bool) -> Any:
        """Leaves gradients to this rank alone until its last micro-batch."""
        if self._is_sharded:
            model: Any = self._model
            model.set_requires_gradient_sync(is_last)
        elif isinstance(self._loss, DistributedDataParallel) and not is_last:
            return self._loss.no_sync()
        return nullcontext()

    def _note_ready(self) -> None:
        self._ready_s = time.perf_counter()


def read_degree(strategy: str, num_ranks: int) -> int | None:
    """The degree of context parallelism that a strategy "cp4" fixes; None for another strategy.

    Raises:
        ConfigError: ranks cannot be cut into groups of such a degree.
    """
    found = re.fullmatch(r"cp(\d+)", strategy)
    if found is None:
        return None
    degree = int(found[1])
    if degree < 1 or degree & (degree - 1) or num_ranks % degree:
        raise ConfigError(
            f"strategy: expected cp and a power of two that divides {num_ranks} ranks, got "
            f"{strategy!r}"
        )
    return degree
