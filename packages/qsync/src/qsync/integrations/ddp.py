"""torch's `DistributedDataParallel` for a model to which a plan was applied.

Weight gradients are float32 on every rank, so nothing of torch's buckets and all-reduces changes. What
is added: a handshake before the first of them, a watch over the time of steps, a loss scaler for
fp16 that is on for all ranks or none, and planning anew in the middle of a run.
"""

import time
from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree as pytree

from qsync.planner.plan import Plan
from qsync.runtime.apply import apply, find_plan
from qsync.runtime.drift import DriftWatch
from qsync.runtime.handshake import agree_on_model
from shared.comms.group import Group, ProcessGroup

__all__ = ["DDP"]


class DDP(DistributedDataParallel):
    """`DistributedDataParallel` whose ranks have agreed on plan, parameters and types.

    For an all-float32 plan it computes what torch's computes, to the bit, by the same collectives.

    Attributes:
        drift: compares steps with the plan's prediction, from the start of a forward pass to the end
            of its backward pass by the host's clock; None if the plan was not measured. Ranks may
            judge unlike: let one of them decide whether all call `replan`.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        process_group: ProcessGroup | None = None,
        **settings: Any,
    ) -> None:
        """Agrees with all ranks, then wraps the model.

        Args:
            module: model, after `qsync.apply`.
            process_group: the ranks; the world's by default.
            settings: those of torch's `DistributedDataParallel`.

        Raises:
            ConfigError: ranks have unlike plans, parameters, buffers, shapes or types, or trained
                parameters that are not float32. All ranks raise it before they exchange a gradient.
            CommError: there are no ranks, or one did not come within the timeout.
        """
        mesh = settings.get("device_mesh")
        group = process_group if mesh is None else mesh.get_group()
        precisions = _agree(module, group or Group.world().checked())
        super().__init__(module, process_group=process_group, **settings)
        self.drift: DriftWatch | None = None
        self._begun_s = 0.0
        self._adopt(precisions)

    @property
    def plan(self) -> Plan | None:
        """The plan that was applied to the model."""
        return find_plan(self.module)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Runs the model."""
        is_watched = self.drift is not None and self.training and torch.is_grad_enabled()
        if not is_watched or torch.compiler.is_compiling():
            return super().forward(*inputs, **kwargs)
        self._begun_s = time.perf_counter()
        outputs = super().forward(*inputs, **kwargs)
        for output in pytree.tree_leaves(outputs):
            if isinstance(output, Tensor) and output.requires_grad:
                output.register_hook(self._on_backward)
                break
        return outputs

    def make_scaler(self, **settings: Any) -> torch.amp.GradScaler:
        """Makes a loss scaler that is on if any rank computes in fp16.

        An overflow of one rank reaches all through the sum of gradients, so that all of them skip the
        step and lower the scale.

        Args:
            settings: those of `torch.amp.GradScaler`.
        """
        return torch.amp.GradScaler(self.device_type, enabled=self._needs_scaler, **settings)

    def replan(
        self, batches: Iterable[Any], loss_fn: Callable[[Any, Any], Tensor], **settings: Any
    ) -> Plan:
        """Plans for what ranks can do now, and applies the plan; every rank calls it between steps.

        Args:
            batches: this rank's training batches.
            loss_fn: returns the loss of (model, batch).
            settings: those of `qsync.plan`.

        Raises:
            ConfigError, DataError: see `qsync.plan`.
        """
        from qsync.profiler.planning import plan

        chosen = plan(self.module, batches, loss_fn, **settings)
        apply(self.module, chosen)
        self._adopt(_agree(self.module, cast("ProcessGroup", self.process_group)))
        return chosen

    def _adopt(self, precisions: frozenset[str]) -> None:
        self._needs_scaler = "fp16" in precisions
        predicted_s = None if self.plan is None else self.plan.step_s
        self.drift = None if predicted_s is None else DriftWatch(predicted_s)

    def _on_backward(self, _grad: Tensor) -> None:
        # A callback of a callback runs after the one in which torch waits for its all-reduces.
        engine: Any = Variable._execution_engine
        engine.queue_callback(lambda: engine.queue_callback(self._on_end))

    def _on_end(self) -> None:
        if self.drift is not None and self.require_backward_grad_sync:
            self.drift.record(time.perf_counter() - self._begun_s)


def _agree(module: nn.Module, group: ProcessGroup) -> frozenset[str]:
    plan = find_plan(module)
    return agree_on_model(module, group, "" if plan is None else plan.fingerprint())
