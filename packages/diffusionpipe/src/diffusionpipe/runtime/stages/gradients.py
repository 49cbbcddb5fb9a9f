"""Adds up parameters' gradients over micro-batches in float32, and over replicas in buckets.

As DistributedDataParallel does, a bucket's sum starts inside the backward pass that completes it, the
last layers' first, and in one order on all ranks. Within a step a stage's gradients lie in memory
once: each moves into its bucket as soon as it is complete.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from shared.comms import Group
from shared.comms.collectives import Reduction, start_all_reduce

__all__ = ["GradientSums"]


@dataclass(eq=False)
class _Slot:
    """A parameter, its sum where that needs a wider type, and its index and first element in a bucket."""

    parameter: nn.Parameter
    bucket: _Bucket | None
    index: int
    first: int
    total: Tensor | None = None
    is_used: bool = False
    is_filled: bool = False

    @property
    def is_narrow(self) -> bool:
        return widen(self.parameter.dtype) != self.parameter.dtype

    def add_narrow(self) -> None:
        """Moves the gradient of a backward pass to a sum of a wider type."""
        if self.is_narrow and self.parameter.grad is not None:
            wide = self.parameter.grad.to(widen(self.parameter.dtype))
            self.total = wide if self.total is None else self.total.add_(wide)
            self.parameter.grad = None

    def take(self) -> Tensor | None:
        """The sum of this rank's gradients, of which nothing is kept here."""
        own = self.total if self.is_narrow else self.parameter.grad
        self.total = self.parameter.grad = None
        return own


@dataclass(eq=False)
class _Bucket:
    """Gradients that are summed over replicas at once.

    `flat` exists from the first gradient to the step. Behind the gradients it has a number for each
    parameter: how many replicas used it.
    """

    group: Group
    label: str
    like: nn.Parameter
    slots: list[_Slot] = field(default_factory=list)
    num_elements: int = 0
    num_filled: int = 0
    flat: Tensor | None = None
    reduction: Reduction | None = None

    def fill(self, slot: _Slot) -> None:
        """Moves a complete gradient in."""
        if self.flat is None:
            size, dtype = self.num_elements + len(self.slots), widen(self.like.dtype)
            self.flat = torch.zeros(size, dtype=dtype, device=self.like.device)
        own = slot.take()
        if own is not None:
            self.view(slot).copy_(own)
        self.flat[self.num_elements + slot.index] = float(slot.is_used)
        slot.is_filled = True
        self.num_filled += 1

    def start(self) -> None:
        """Starts the sum, once."""
        if self.reduction is None and self.flat is not None:
            with self.group.ledger.phase(self.label):
                self.reduction = start_all_reduce(self.group, self.flat)

    def wait(self) -> list[Tensor | None]:
        """Waits for the sum of each gradient; None for a parameter that no replica used."""
        assert self.reduction is not None, "flushed"
        assert self.flat is not None, "started"
        with self.group.ledger.phase(self.label):
            self.reduction.wait()
        used = self.flat[self.num_elements :].tolist()
        return [self.view(slot) if n else None for slot, n in zip(self.slots, used, strict=True)]

    def view(self, slot: _Slot) -> Tensor:
        """A parameter's part of `flat`."""
        assert self.flat is not None, "filled"
        shape = slot.parameter.shape
        return self.flat[slot.first : slot.first + shape.numel()].view(shape)


class GradientSums:
    """The gradients of a rank's parameters."""

    def __init__(
        self,
        stages: Mapping[int, Sequence[nn.Parameter]],
        groups: Mapping[int, Group],
        bucket_bytes: int,
    ) -> None:
        """Hooks the parameters.

        Args:
            stages: trainable parameters by stage, each stage's from its first layer to its last.
            groups: ranks that hold a stage, of the stages that several hold.
            bucket_bytes: most bytes of a bucket with more than one parameter.
        """
        self._slots: dict[int, list[_Slot]] = {}
        self._buckets: dict[int, list[_Bucket]] = {}
        self._final_stage: int | None = None
        self._is_running = False
        for stage, parameters in stages.items():
            self._slots[stage], self._buckets[stage] = [], []
            # Gradients are complete from the last layer to the first.
            for parameter in reversed(parameters):
                bucket = None
                if stage in groups:
                    bucket = self._find_bucket(stage, groups[stage], parameter, bucket_bytes)
                index, first = (len(bucket.slots), bucket.num_elements) if bucket else (0, 0)
                slot = _Slot(parameter, bucket, index, first)
                self._slots[stage].append(slot)
                if bucket is not None:
                    bucket.slots.append(slot)
                    bucket.num_elements += parameter.numel()
                self._hook(slot, stage)

    def begin_backward(self, stage: int, *, is_final: bool) -> None:
        """Announces a backward pass; behind the last one of a stage its gradients are complete."""
        self._final_stage = stage if is_final else None
        self._is_running = True

    def flush(self, stage: int) -> None:
        """Starts the sums of a stage that are not under way yet; all its ranks call it."""
        self._final_stage = None
        for slot in self._slots[stage]:
            self._fill(slot, stage)

    def wait(self) -> None:
        """Waits for all sums and gives each parameter its gradient, None where it had none anywhere.

        Raises:
            CommError: a replica died or the timeout passed; names the ranks and the stage.
        """
        for stage, slots in self._slots.items():
            self.flush(stage)
            sums = [total for bucket in self._buckets[stage] for total in bucket.wait()]
            totals = sums if self._buckets[stage] else [slot.take() for slot in slots]
            for slot, total in zip(slots, totals, strict=True):
                slot.parameter.grad = None if total is None else total.to(slot.parameter.dtype)

    def find_bad_stages(self) -> list[int]:
        """Stages with a gradient that is not finite, after `wait`."""
        bad = []
        for stage, slots in self._slots.items():
            grads = [slot.parameter.grad for slot in slots if slot.parameter.grad is not None]
            sums = [grad.sum(dtype=widen(grad.dtype)).double() for grad in grads]
            if sums and not torch.stack(sums).isfinite().all():
                bad.append(stage)
        return bad

    def clear(self) -> None:
        """Forgets all gradients, after the optimizer's step or in place of it."""
        self._final_stage, self._is_running = None, False
        for slots in self._slots.values():
            for slot in slots:
                slot.take()
                slot.is_used = slot.is_filled = False
        for buckets in self._buckets.values():
            for bucket in buckets:
                bucket.flat = bucket.reduction = None
                bucket.num_filled = 0

    def _find_bucket(
        self, stage: int, group: Group, parameter: nn.Parameter, bucket_bytes: int
    ) -> _Bucket:
        """The stage's last bucket, or a new one if that is full or of another type or device."""
        buckets, wide = self._buckets[stage], widen(parameter.dtype)
        if buckets:
            last = buckets[-1]
            num_bytes = (last.num_elements + parameter.numel()) * wide.itemsize
            is_like = (widen(last.like.dtype), last.like.device) == (wide, parameter.device)
            if is_like and num_bytes <= bucket_bytes:
                return last
        buckets.append(_Bucket(group, f"gradients of stage {stage}", parameter))
        return buckets[-1]

    def _hook(self, slot: _Slot, stage: int) -> None:
        # Weakly, so that a parameter outlives its engine but does not keep it.
        owner, index = weakref.ref(self), len(self._slots[stage]) - 1

        def accumulate(_: nn.Parameter) -> None:
            sums = owner()
            # Else another engine trains the same parameters.
            if sums is not None and sums._is_running:
                sums._accumulate(sums._slots[stage][index], stage)

        slot.parameter.register_post_accumulate_grad_hook(accumulate)

    def _accumulate(self, slot: _Slot, stage: int) -> None:
        slot.is_used = True
        slot.add_narrow()
        if stage == self._final_stage:
            self._fill(slot, stage)

    def _fill(self, slot: _Slot, stage: int) -> None:
        """Moves a complete gradient into its bucket, and starts the sums that are next in order."""
        if slot.bucket is None or slot.is_filled:
            return
        slot.bucket.fill(slot)
        for bucket in self._buckets[stage]:
            if bucket.num_filled < len(bucket.slots):
                return
            bucket.start()


def widen(dtype: torch.dtype) -> torch.dtype:
    """The type in which gradients of a type are added: float32 at least."""
    return torch.promote_types(dtype, torch.float32)
