"""Steps of unequal replicas side by side, over an optimizer layout that stays.

The paper's system (Hydraulis, arXiv 2412.07894). For each step the fastest candidate is planned;
parameters move to its layout, every replica runs its micro-batches through its pipeline, and gradients
are summed back. What a change of strategy costs is what every step moves anyway.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hydraulis.planner.proposals import ReplicaShape, exclusions
from hydraulis.planner.replicas import (
    MovedBytes,
    ReplicaLayout,
    ReplicaPlan,
    plan_replicas,
    rank_grids,
    stage_layers,
)
from hydraulis.planner.schedule import StepPlan
from hydraulis.runtime.loss import check_family
from hydraulis.runtime.replicas.exchange import LayoutExchange, connect_lanes
from hydraulis.runtime.replicas.member import StageMember, make_groups
from hydraulis.runtime.replicas.optimizer_layout import OptimizerLayout
from hydraulis.runtime.replicas.shards import read_placements
from hydraulis.runtime.replicas.stage import ModelStage, outline
from hydraulis.runtime.steps import PlannedStep
from shared.comms import Group
from shared.errors import ConfigError

__all__ = ["ReplicaRunner"]

log = logging.getLogger(__name__)


class ReplicaRunner:
    """Plans and computes steps on sets of replicas.

    Attributes:
        max_document: tokens of the longest document that a replica of a candidate holds.
    """

    def __init__(
        self,
        model: nn.Module,
        group: Group | None,
        candidates: Sequence[Sequence[ReplicaShape]],
        *,
        max_tokens: int,
    ) -> None:
        """Shards the model's parameters in the optimizer's layout; every rank calls it alike.

        Args:
            model: a Hugging Face causal LM that is not sharded; see `OptimizerLayout`.
            group: all ranks.
            candidates: sets of replicas.
            max_tokens: most tokens that a rank holds; lowers the replicas' caps.

        Raises:
            ConfigError: no group, a sharded model, a model whose plans are not known here, or no
                candidate that can run.
            CommError: a rank died or the timeout passed.
        """
        check_family(model)
        if group is None or hasattr(model, "set_requires_gradient_sync"):
            raise ConfigError(
                "replicas: expected ranks and a model that is not sharded, got "
                + ("one process; start ranks by torchrun" if group is None else "FSDP2's; pass it plain")
            )  # fmt: skip
        self._group, self._max_tokens = group, max_tokens
        placements = read_placements(model)
        self._num_layers: int = model.config.num_hidden_layers  # type: ignore[union-attr]
        outlined = outline(model)
        self._candidates = [
            tuple(
                replace(one, cap=min(one.cap, max_tokens * one.ring * one.ulysses))
                for one in shapes
            )
            for shapes in self._usable(candidates, model.config)
        ]
        self.max_document = max(one.cap for shapes in self._candidates for one in shapes)
        self._exchanges = [
            LayoutExchange(
                ReplicaLayout(placements, shapes, self._num_layers, group.world_size), group
            )
            for shapes in self._candidates
        ]
        self._members = [
            self._make_member(exchange.layout, rank_grids(shapes), outlined)
            for exchange, shapes in zip(self._exchanges, self._candidates, strict=True)
        ]
        self._layout = OptimizerLayout(model, group)
        connect_lanes(group)

    def plan(self, lengths: Sequence[int] | np.ndarray) -> ReplicaPlan:
        """Plans a step of documents of these lengths."""
        return plan_replicas(lengths, self._candidates, self._group.world_size)

    def places(self, plan: StepPlan | ReplicaPlan) -> list[int]:
        """Places of the documents that this rank reads of a step."""
        assert not isinstance(plan, StepPlan), "planned here"
        member = self._members[plan.candidate]
        mine = () if member is None else plan.micro_batches[member.replica]
        return [place for documents in mine for place in documents]

    def moved_bytes(self, plan: ReplicaPlan) -> MovedBytes:
        """Bytes that a step sends to change layouts, by rank."""
        return self._exchanges[plan.candidate].moved

    def compute(self, step: PlannedStep, num_losses: int) -> tuple[Tensor, float]:
        """Moves parameters, runs this rank's stage, and sums gradients into the optimizer's layout.

        Nothing of the optimizer's layout is written to before all gradients are there.

        Args:
            step: planned here.
            num_losses: next tokens of the whole step, by which losses are divided.

        Returns:
            This rank's share of the loss, and the time at which its own gradients were complete.

        Raises:
            torch.OutOfMemoryError: memory ran out, while other ranks wait for this one.
            CommError: a rank died or the timeout passed.
        """
        assert not isinstance(step.plan, StepPlan), "planned here"
        number = step.plan.candidate
        exchange, member = self._exchanges[number], self._members[number]
        owned = self._layout.owned()
        parameters = exchange.load(owned)
        total = torch.zeros((), dtype=torch.float64, device=self._group.device)
        gradients: dict[str, Tensor] = {}
        if member is not None:
            try:
                gradients = member.run(step, step.plan, parameters, num_losses, total)
            except torch.OutOfMemoryError as error:
                error.add_note(
                    f"in {step.plan.shapes[member.replica]}, replica {member.replica} of the step, where "
                    f"others wait for this rank; start again with max_tokens below {self._max_tokens}"
                )
                raise
        parameters.wait(self._num_layers)
        del parameters
        ready_s = time.perf_counter()
        self._layout.set_gradients(exchange.sum_gradients(gradients, owned))
        return total, ready_s

    def evaluate(self, step: PlannedStep, num_losses: int) -> Tensor:
        """This rank's share of a step's loss, without gradients; arguments as of `compute`."""
        assert not isinstance(step.plan, StepPlan), "planned here"
        number = step.plan.candidate
        exchange, member = self._exchanges[number], self._members[number]
        parameters = exchange.load(self._layout.owned())
        total = torch.zeros((), dtype=torch.float64, device=self._group.device)
        if member is not None:
            member.evaluate(step, step.plan, parameters, num_losses, total)
        parameters.wait(self._num_layers)
        return total

    def _usable(
        self, candidates: Sequence[Sequence[ReplicaShape]], config: Any
    ) -> list[Sequence[ReplicaShape]]:
        """Candidates that can run; the others are logged with their reason."""
        found, reasons = [], []
        for shapes in candidates:
            name, taken = "+".join(map(str, shapes)), sum(one.num_ranks for one in shapes)
            left_out = exclusions(
                shapes, self._group.world_size, num_heads=config.num_attention_heads,
                num_kv_heads=config.num_key_value_heads, num_layers=self._num_layers,
                vocab=config.vocab_size,
            )  # fmt: skip
            reason = "; ".join(f"{one} {why}" for one, why in left_out.items())
            if not reason and taken > self._group.world_size:
                reason = f"takes {taken} ranks of {self._group.world_size}"
            if reason:
                reasons.append(f"{name}: {reason}")
                log.warning("engine: leaves out %s", reasons[-1])
            else:
                found.append(shapes)
        if not found:
            raise ConfigError(
                f"replicas: expected a candidate that can run, got {', '.join(reasons) or 'none'}"
            )
        return found

    def _make_member(
        self, layout: ReplicaLayout, grids: Sequence[np.ndarray], outlined: nn.Module
    ) -> StageMember | None:
        """This rank's stage in a strategy, if it has one; all ranks make all groups."""
        found = None
        for replica, grid in enumerate(grids):
            pipeline, ring, ulysses, shards = (make_groups(grid, axis) for axis in range(4))
            if self._group.rank not in grid:
                continue
            number = int(np.argwhere(grid == self._group.rank)[0][0])
            held = {
                one.name: (one, layout.held(one)[self._group.rank]) for one in layout.parameters
            }
            layers = stage_layers(self._num_layers, len(grid))[number]
            found = StageMember(
                replica=replica, stage=ModelStage(outlined, held, layers, shards),
                pipeline=pipeline, ring=ring, ulysses=ulysses, device=self._group.device,
            )  # fmt: skip
        return found
