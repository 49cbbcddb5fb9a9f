"""A rank's stages: forward and backward passes of micro-batches, cut off from other ranks' graphs.

A value that another stage wrote enters as a leaf. Its gradient leaves as the leaf's, and the writer
continues the backward pass with it, so autograd never sees another rank, nor another stage.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from diffusionpipe.job.draws import Draw
from diffusionpipe.job.job import Job, Prepared
from diffusionpipe.job.layers import OUTPUT
from diffusionpipe.planner.traffic import Rows
from diffusionpipe.runtime.instructions import Dataflow, StageFlow
from diffusionpipe.runtime.stages.gradients import GradientSums
from diffusionpipe.runtime.stages.health import Health

__all__ = ["StageCompute"]


@dataclass(frozen=True, slots=True)
class _Kept:
    """What a backward pass needs of its forward pass."""

    leaves: dict[str, Tensor]
    exports: dict[str, Tensor]
    loss: Tensor | None


class StageCompute:
    """Computes a rank's actions with torch.

    Attributes:
        job: whose layers and frozen functions run.
        stages: all virtual stages of the plan.
        sums: gradients of this rank's parameters.
        health: notes values that are not finite.
        loss: sum of losses over this rank's samples, over the batch's number of samples.
    """

    def __init__(
        self,
        job: Job,
        flow: Dataflow,
        stages: Sequence[StageFlow],
        own_stages: Sequence[int],
        sums: GradientSums,
        seed: int,
    ) -> None:
        """Takes this rank's stages.

        Args:
            job: the whole job.
            flow: names of its values.
            stages: all virtual stages of the plan.
            own_stages: those that this rank holds.
            sums: gradients of their parameters.
            seed: of the draws.
        """
        self.job, self.stages, self.sums, self.seed = job, stages, sums, seed
        self.health = Health()
        self.loss = torch.zeros((), dtype=torch.float64)
        self._differentiable = [backbone.differentiable for backbone in flow.backbones]
        self._num_uses = sum(stages[stage].is_prepared for stage in own_stages)
        self._prepared: dict[tuple[bool, int], list[Any]] = {}
        self._kept: dict[tuple[int, int], _Kept] = {}
        self._step = self._num_rows = 0
        self._batch: Mapping[str, Any] = {}
        self._next: Mapping[str, Any] = {}

    def begin(
        self, step: int, batch: Mapping[str, Any] | None, following: Mapping[str, Any] | None
    ) -> None:
        """Begins a step.

        Args:
            step: index of the step, which `following` belongs to the next of.
            batch: whose passes run; None when only `following` is encoded.
            following: the next batch, whose frozen outputs are encoded; None behind the last.
        """
        self._step, self._batch, self._next = step, batch or {}, following or {}
        self._num_rows = self.job.num_samples(batch) if batch else 0
        self.loss = torch.zeros((), dtype=torch.float64)
        self.health = Health()
        self._prepared.clear()
        self._kept.clear()

    def is_prepared(self, micro_batch: int, *, is_estimate: bool) -> bool:
        """Whether a micro-batch's inputs are there."""
        return (is_estimate, micro_batch) in self._prepared

    def prepare(
        self, micro_batch: int, samples: Rows, frozen: Mapping[str, Tensor], *, is_estimate: bool
    ) -> None:
        """Makes a micro-batch's inputs and targets.

        Args:
            micro_batch: its index.
            samples: rows of the batch.
            frozen: all frozen outputs of these rows, and what was estimated.
            is_estimate: these are the inputs of the pass that estimates.
        """
        rows = range(*samples)
        draw = Draw(self.seed, self._step, rows)
        prepared = self.job.prepare(self.job.take(self._batch, rows), frozen, draw)
        self._prepared[is_estimate, micro_batch] = [prepared, self._num_uses]

    @torch.enable_grad()
    def forward(
        self, stage: int, micro_batch: int, samples: Rows, values: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Runs a stage's layers.

        Args:
            stage: virtual stage.
            micro_batch: its index.
            samples: rows of the batch.
            values: what the stage imports.

        Returns:
            What it exports.
        """
        flow = self.stages[stage]
        differentiable = self._differentiable[flow.backbone]
        prepared = self._use_prepared((False, micro_batch), flow) if flow.is_prepared else None
        leaves = {
            key: values[key].detach().requires_grad_(key in differentiable) for key in flow.imports
        }
        state = dict(leaves)
        if prepared is not None:
            state |= {key: prepared.state[key] for key in flow.inputs}
        written = self.job.chains[flow.backbone].run(state, flow.first, flow.stop)
        loss = None
        if prepared is not None and flow.is_last:
            num_rows = samples[1] - samples[0]
            losses = self.job.compute_losses(written[OUTPUT], prepared.target, num_rows)
            self.health.note(stage, "loss", samples, losses)
            loss = losses.sum() / self._num_rows
            self.loss += loss.detach().double().cpu()
        exports = {key: written[key] for key in flow.exports}
        for value in exports.values():
            self.health.note(stage, "forward", samples, value)
        self._kept[stage, micro_batch] = _Kept(leaves, exports, loss)
        return {key: value.detach() for key, value in exports.items()}

    @torch.no_grad()
    def estimate(
        self, stage: int, micro_batch: int, samples: Rows, values: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Runs a stage's layers without gradients; arguments as for `forward`.

        Returns:
            What it exports, and on the last stage the backbone's output.
        """
        flow = self.stages[stage]
        state = {key: values[key] for key in flow.imports}
        if flow.is_prepared:
            prepared = self._use_prepared((True, micro_batch), flow)
            state |= {key: prepared.state[key] for key in flow.inputs}
        return self.job.chains[flow.backbone].run(state, flow.first, flow.stop)

    @torch.enable_grad()
    def backward(
        self,
        stage: int,
        micro_batch: int,
        samples: Rows,
        gradients: Mapping[str, Tensor],
        *,
        is_final: bool,
    ) -> dict[str, Tensor]:
        """Runs a stage's layers backward; parameters' gradients are added up in `sums`.

        Args:
            stage: virtual stage.
            micro_batch: its index.
            samples: rows of the batch.
            gradients: of the values that it exports.
            is_final: no other backward pass of this stage follows in the step.

        Returns:
            Gradients of the differentiable values that it imports.
        """
        kept = self._kept.pop((stage, micro_batch))
        roots = [kept.exports[key] for key in gradients if kept.exports[key].requires_grad]
        seeds: list[Tensor | None] = [
            gradients[key] for key in gradients if kept.exports[key].requires_grad
        ]
        if kept.loss is not None and kept.loss.requires_grad:
            roots.append(kept.loss)
            seeds.append(None)
        self.sums.begin_backward(stage, is_final=is_final)
        if roots:
            torch.autograd.backward(roots, seeds)
        result = {}
        for key, leaf in kept.leaves.items():
            if leaf.requires_grad:
                # A value that does not change the loss gets no gradient, and one is waited for.
                gradient = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
                result[key] = gradient
                self.health.note(stage, "backward", samples, gradient)
        return result

    def flush(self, stage: int) -> None:
        """Starts what is left of a stage's sums over replicas."""
        self.sums.flush(stage)

    @torch.no_grad()
    def encode(self, component: str, samples: Rows) -> dict[str, Tensor]:
        """Runs a frozen component on rows of the next batch, and returns its outputs."""
        rows = range(*samples)
        draw = Draw(self.seed, self._step + 1, rows)
        outputs = self.job.encode(component, self.job.take(self._next, rows), draw)
        return {name: value.detach() for name, value in outputs.items()}

    def _use_prepared(self, key: tuple[bool, int], flow: StageFlow) -> Prepared:
        """A micro-batch's inputs, which are dropped after this rank's last use."""
        entry = self._prepared[key]
        entry[1] -= 1
        if not entry[1]:
            del self._prepared[key]
        return entry[0][flow.backbone]
