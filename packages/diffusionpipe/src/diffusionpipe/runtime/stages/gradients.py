"""Adds up parameters' gradients over micro-batches in float32, and over replicas in buckets.

As DistributedDataParallel does, a bucket's sum starts inside the backward pass that completes it, the
last layers' first, and in one order on all ranks. Within a step a stage's gradients lie in memory
once: each moves into its bucket as soon as it is complete.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from shared.comms import Group
from shared.comms.collectives import Reduction, start_all_reduce

__all__ = ["GradientSums"]


@dataclass(eq=False)
class _Slot:
    """A parameter, its sum where that needs a wider type, and its place in a bucket."""

    parameter: nn.Parameter
    bucket: _Bucket | None
    offset: int
    total: Tensor | None = None
    is_used: bool = False
    is_filled: bool = False

    @property
    def is_narrow(self) -> bool:
        return widen(self.parameter.dtype) != self.parameter.dtype

    def take(self) -> Tensor | None:
        """The sum of this rank's gradients, of which nothing is kept here."""
        own = self.total if self.is_narrow else self.parameter.grad
        self.total = self.parameter.grad = None
        return own


@dataclass(eq=False)
class _Bucket:
    """Gradients that are summed over replicas at once; `flat` exists from the first to the step."""

    group: Group
    label: str
    dtype: torch.dtype
    device: torch.device
    slots: list[_Slot] = field(default_factory=list)
    num_elements: int = 0
    num_filled: int = 0
    flat: Tensor | None = None
    reduction: Reduction | None = None


class GradientSums:
    """The gradients of a rank's parameters.

    Attributes:
        groups: ranks that hold each stage, of those that several hold.
    """

    def __init__(
        self,
        stages: Mapping[int, Sequence[nn.Parameter]],
        groups: Mapping[int, Group],
        bucket_bytes: int,
    ) -> None:
        """Hooks the parameters.

        Args:
            stages: trainable parameters by stage, each stage's from its first layer to its last.
            groups: of the stages that several ranks hold.
            bucket_bytes: most bytes of a bucket with more than one parameter.
        """
        self.groups = dict(groups)
        self._slots: dict[int, list[_Slot]] = {}
        self._buckets: dict[int, list[_Bucket]] = {}
        self._flags: dict[int, tuple[Tensor, Reduction]] = {}
        self._final_stage: int | None = None
        self._is_running = False
        for stage, parameters in stages.items():
            # Gradients are complete from the last layer to the first.
            self._fill_buckets(stage, list(reversed(parameters)), bucket_bytes)

    def begin_backward(self, stage: int, *, is_final: bool) -> None:
        """Announces a backward pass; behind the last one of a stage its gradients are complete."""
        self._final_stage = stage if is_final else None
        self._is_running = True

    def flush(self, stage: int) -> None:
        """Starts the sums of a stage that are not under way yet; all its ranks call it."""
        self._final_stage = None
        if stage not in self.groups or stage in self._flags or not self._slots[stage]:
            return
        for slot in self._slots[stage]:
            if not slot.is_filled:
                self._fill(slot, stage)
        group = self.groups[stage]
        used = [float(slot.is_used) for slot in self._slots[stage]]
        flags = torch.tensor(used, device=group.device)
        with group.ledger.phase("agreement"):
            self._flags[stage] = flags, start_all_reduce(group, flags)

    def wait(self) -> None:
        """Waits for all sums and gives each parameter its gradient, None where it had none anywhere.

        Raises:
            CommError: a replica died or the timeout passed; names the ranks and the stage.
        """
        for stage, slots in self._slots.items():
            self.flush(stage)
            used = [slot.is_used for slot in slots]
            if stage in self._flags:
                for bucket in self._buckets[stage]:
                    assert bucket.reduction is not None, "flushed"
                    with bucket.group.ledger.phase(bucket.label):
                        bucket.reduction.wait()
                flags, reduction = self._flags[stage]
                with self.groups[stage].ledger.phase("agreement"):
                    reduction.wait()
                used = [flag > 0 for flag in flags.tolist()]
            for slot, is_used in zip(slots, used, strict=True):
                total = slot.take() if slot.bucket is None else _cut_from(slot)
                if is_used and total is not None:
                    slot.parameter.grad = total.to(slot.parameter.dtype)

    def find_bad_stages(self) -> list[int]:
        """Stages with a gradient that is not finite, after `wait`."""
        bad = []
        for stage, slots in self._slots.items():
            grads = [slot.parameter.grad for slot in slots if slot.parameter.grad is not None]
            sums = [grad.sum(dtype=widen(grad.dtype)) for grad in grads]
            if sums and not torch.stack([one.double() for one in sums]).isfinite().all():
                bad.append(stage)
        return bad

    def clear(self) -> None:
        """Forgets all gradients, after the optimizer's step or in place of it."""
        self._flags.clear()
        self._final_stage, self._is_running = None, False
        for slots in self._slots.values():
            for slot in slots:
                slot.take()
                slot.is_used = slot.is_filled = False
        for buckets in self._buckets.values():
            for bucket in buckets:
                bucket.flat = bucket.reduction = None
                bucket.num_filled = 0

    def _fill_buckets(
        self, stage: int, parameters: Sequence[nn.Parameter], bucket_bytes: int
    ) -> None:
        buckets: list[_Bucket] = []
        self._slots[stage], self._buckets[stage] = [], buckets
        group = self.groups.get(stage)
        for parameter in parameters:
            bucket, offset = None, 0
            if group is not None:
                wide = widen(parameter.dtype)
                bucket = buckets[-1] if buckets else None
                if (
                    bucket is None
                    or (bucket.dtype, bucket.device) != (wide, parameter.device)
                    or (bucket.num_elements + parameter.numel()) * wide.itemsize > bucket_bytes
                ):
                    label = f"gradients of stage {stage}"
                    bucket = _Bucket(group, label, wide, parameter.device)
                    buckets.append(bucket)
                offset = bucket.num_elements
                bucket.num_elements += parameter.numel()
            slot = _Slot(parameter, bucket, offset)
            self._slots[stage].append(slot)
            if bucket is not None:
                bucket.slots.append(slot)
            self._hook(slot, stage)

    def _hook(self, slot: _Slot, stage: int) -> None:
        def accumulate(parameter: nn.Parameter) -> None:
            if not self._is_running:
                return  # another engine trains the same parameters
            slot.is_used = True
            if slot.is_narrow and parameter.grad is not None:
                wide = parameter.grad.to(widen(parameter.dtype))
                slot.total = wide if slot.total is None else slot.total.add_(wide)
                parameter.grad = None
            if stage == self._final_stage and slot.bucket is not None:
                self._fill(slot, stage)

        slot.parameter.register_post_accumulate_grad_hook(accumulate)

    def _fill(self, slot: _Slot, stage: int) -> None:
        """Moves a complete gradient into its bucket, and starts the sums that are next in order."""
        bucket = slot.bucket
        assert bucket is not None, "the stage has replicas"
        if bucket.flat is None:
            bucket.flat = torch.zeros(bucket.num_elements, dtype=bucket.dtype, device=bucket.device)
        own = slot.take()
        if own is not None:
            end = slot.offset + slot.parameter.numel()
            bucket.flat[slot.offset : end].copy_(own.reshape(-1))
        slot.is_filled = True
        bucket.num_filled += 1
        for one in self._buckets[stage]:
            if one.num_filled < len(one.slots):
                return
            if one.reduction is None and one.flat is not None:
                with one.group.ledger.phase(one.label):
                    one.reduction = start_all_reduce(one.group, one.flat)


def widen(dtype: torch.dtype) -> torch.dtype:
    """The type in which gradients of a type are added: float32 at least."""
    return torch.promote_types(dtype, torch.float32)


def _cut_from(slot: _Slot) -> Tensor | None:
    """A gradient's part of the summed bucket."""
    assert slot.bucket is not None, "asked for slots in buckets"
    if slot.bucket.flat is None:
        return None
    end = slot.offset + slot.parameter.numel()
    return slot.bucket.flat[slot.offset : end].view(slot.parameter.shape)
