"""What a rank does in a strategy: the stage that it computes, with which ranks, of which replica."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hydraulis.planner.replicas import ReplicaPlan
from hydraulis.runtime.replicas.exchange import LoadedParameters
from hydraulis.runtime.replicas.stage import ModelStage
from hydraulis.runtime.steps import PlannedStep, Row, make_row
from shared.comms import Group
from shared.comms.pipeline import run_1f1b, run_forward

__all__ = ["StageMember", "make_groups"]


@dataclass(frozen=True, kw_only=True, eq=False)
class StageMember:
    """A rank's part in a strategy.

    Attributes:
        replica: its number.
        stage: the layers that the rank computes.
        pipeline, ring, ulysses: the ranks of its other stages, and those over which tokens lie; None
            where it is alone.
        device: of its tensors.
    """

    replica: int
    stage: ModelStage
    pipeline: Group | None
    ring: Group | None
    ulysses: Group | None
    device: torch.device

    def run(
        self, step: PlannedStep, plan: ReplicaPlan, parameters: LoadedParameters, num_losses: int,
        total: Tensor,
    ) -> dict[str, Tensor]:  # fmt: skip
        """Forward and backward passes of the replica's micro-batches.

        Args:
            step: whose documents are read.
            plan: of the step.
            parameters: of the stage.
            num_losses: by which losses are divided.
            total: to which the last stage adds its loss, once for all tensor-parallel ranks.

        Returns:
            Gradients of what this rank holds, zeros without micro-batches.

        Raises:
            CommError: a rank died or the timeout passed.
        """
        stage = self.stage
        stage.load(parameters)
        rows = self._rows(step, plan)

        def forward(k: int, states: Tensor | None) -> Tensor:
            out = stage.forward(rows[k], states)
            if not stage.is_last:
                return out
            if stage.group is None or not stage.group.rank:
                total.add_(out.detach() / num_losses)
            return out / num_losses

        shapes = [(1, len(row.ids), stage.width) for row in rows]
        with stage.attending():
            run_1f1b(self.pipeline, shapes, forward, dtype=stage.dtype)
        return stage.release()

    def evaluate(
        self, step: PlannedStep, plan: ReplicaPlan, parameters: LoadedParameters, num_losses: int,
        total: Tensor,
    ) -> None:  # fmt: skip
        """Forward passes of the replica's micro-batches; arguments and errors as of `run`."""
        stage = self.stage
        stage.load(parameters)
        rows = self._rows(step, plan)

        def forward(k: int, states: Tensor | None) -> Tensor:
            out = stage.forward(rows[k], states)
            if stage.is_last and (stage.group is None or not stage.group.rank):
                total.add_(out / num_losses)
            return out

        shapes = [(1, len(row.ids), stage.width) for row in rows]
        with stage.attending():
            run_forward(self.pipeline, shapes, forward, dtype=stage.dtype)
        stage.release()

    def _rows(self, step: PlannedStep, plan: ReplicaPlan) -> list[Row]:
        return [
            make_row(step, documents, self.device, ring=self.ring, ulysses=self.ulysses)
            for documents in plan.micro_batches[self.replica]
        ]


def make_groups(grid: np.ndarray, axis: int) -> Group | None:
    """This rank's group along an axis, None if it is alone; all ranks make all of them."""
    found = None
    lines = np.moveaxis(grid, axis, -1).reshape(-1, grid.shape[axis])
    for ranks in lines.tolist():
        if len(ranks) > 1:
            made = Group.of(ranks)
            found = made if made.rank >= 0 else found
    return found
