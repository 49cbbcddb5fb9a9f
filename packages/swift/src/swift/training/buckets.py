"""Gradients in buckets, in the order in which a backward pass makes them, averaged over ranks.

`dp.backward(loss)` divides the loss by the number of ranks and updates a bucket behind its sum. Torch's own
`loss.backward()` knows nothing of ranks: its first gradient has the averages made by its end, as torch's
DistributedDataParallel does, so that whatever reads gradients between it and `optimizer.step()` reads
averages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shared.comms import Group
from shared.comms.collectives import Reduction, start_all_reduce
from shared.errors import CommError, ConfigError
from swift.injection import reach
from swift.undo.torch_step import local, part_of

__all__ = ["Averager", "Bucket", "Sample", "plan_buckets"]

_NUM_SAMPLED = 256
"""Gradients of a bucket that are kept, to compare a repeated step by."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """Parameters whose gradients are reduced in one message.

    Attributes:
        indices: places of its parameters in the optimizer's order.
        buffer: gradients one behind another, then one element a parameter: 1 where this rank has a
            gradient of it.
        views: the gradients in `buffer`, each in the shape of its parameter on this rank.
        grads: what `grad` of the parameters is then: the views, of a DTensor as its local part.
        used: the elements behind them.
    """

    indices: tuple[int, ...]
    buffer: Tensor
    views: tuple[Tensor, ...]
    grads: tuple[Tensor, ...]
    used: Tensor


def plan_buckets(parameters: Sequence[Tensor], bucket_bytes: int) -> list[Bucket]:
    """Divides parameters into buckets, the last ones first.

    Args:
        parameters: in the optimizer's order, which is roughly that of the forward pass.
        bucket_bytes: of a bucket's gradients; a larger parameter has a bucket of its own.

    Returns:
        The buckets, with memory; each of one type and device.
    """
    groups: list[list[int]] = []
    open_groups: dict[tuple[torch.dtype, torch.device], tuple[list[int], int]] = {}
    for index in reversed(range(len(parameters))):
        one = local(parameters[index])
        key = (one.dtype, one.device)
        num_bytes = one.numel() * one.element_size()
        group, filled = open_groups.get(key, ([], 0))
        if not group or filled + num_bytes > bucket_bytes:
            group, filled = [], 0
            groups.append(group)
        group.append(index)
        open_groups[key] = (group, filled + num_bytes)
    return [_allocate(parameters, group) for group in groups]


def _allocate(parameters: Sequence[Tensor], indices: Sequence[int]) -> Bucket:
    parts = [local(parameters[i]) for i in indices]
    numels = [one.numel() for one in parts]
    first = parts[0]
    buffer = torch.zeros(sum(numels) + len(indices), dtype=first.dtype, device=first.device)
    *grads, used = buffer.split([*numels, len(indices)])
    views = tuple(_shaped(grad, one) for grad, one in zip(grads, parts, strict=True))
    wholes = [parameters[i] for i in indices]
    whole_grads = tuple(
        part_of(one, view, getattr(one, "device_mesh", None))
        for one, view in zip(wholes, views, strict=True)
    )
    return Bucket(tuple(indices), buffer, views, whole_grads, used)


def _shaped(grad: Tensor, like: Tensor) -> Tensor:
    # Gradients in the parameter's own memory format, or autograd would convert them each time.
    is_dense = torch.empty_like(like).stride() == like.stride()
    return (
        grad.as_strided(like.shape, like.stride(), grad.storage_offset())
        if is_dense
        else grad.view(like.shape)
    )


class Sample:
    """Some of this rank's own gradients in a step: a step that is repeated must have the same.

    Args:
        step: which.
        place: rank and number of ranks, on which a rank's data depend.
    """

    def __init__(self, step: int, place: tuple[int, int] = (0, 1)) -> None:
        self.step = step
        self._place = place
        self._gradients: list[Tensor] = []

    def take(self, bucket: int, buffer: Tensor) -> None:
        """Copies some gradients of a bucket, before its first sum over ranks."""
        if bucket == len(self._gradients):
            self._gradients.append(buffer[:: max(1, buffer.numel() // _NUM_SAMPLED)].clone())

    def describe_difference(self, torn: Sample) -> str | None:
        """How this step differs from what was seen of it before; None if it does not."""
        if (torn.step, torn._place) != (self.step, self._place):
            return None
        pairs = list(zip(self._gradients, torn._gradients, strict=False))
        if all(torch.equal(ours.nan_to_num(), theirs.nan_to_num()) for ours, theirs in pairs):
            return None
        largest = max(float((ours - theirs).abs().max()) for ours, theirs in pairs)
        return (
            f"step {self.step} was repeated, but its gradients differ from those before the failure, by "
            f"up to {largest:.3g}: the result is another than without the failure. The step function "
            f"reads something that does not follow from step, rank and state, as an iterator or a "
            f"generator of its own: read data by swift.StepData, draw from the global generators, or "
            f"give what it reads to stateful=[...]"
        )


class Averager:
    """Averages the gradients of parameters over ranks, a bucket a message.

    Args:
        names: of the parameters, for errors.
        bucket_bytes: see `plan_buckets`.
        on_backward: called as each backward pass begins, or brings its first gradient.
        on_first_sum: called when all ranks have added to the first bucket's sum.

    Attributes:
        buckets: of the parameters that there are now.
        sample: of this rank's gradients in the newest step.
        is_in_step: between `begin` and the end of a step; gradients of other times are left alone.
        is_synchronised: whether torch's own backward passes end in averages.
        is_averaged: whether gradients are averages as they are.
        is_loss_divided: whether the step's losses were divided by the number of ranks; None before its
            first backward pass.
    """

    def __init__(
        self,
        names: Sequence[str],
        bucket_bytes: int,
        *,
        on_backward: Callable[[], None],
        on_first_sum: Callable[[], None],
    ) -> None:
        self.buckets: list[Bucket] = []
        self.sample = Sample(-1)
        self.is_in_step = False
        self.is_synchronised = True
        self.is_averaged = False
        self.is_loss_divided: bool | None = None
        self._names, self._bucket_bytes = names, bucket_bytes
        self._on_backward, self._on_first_sum = on_backward, on_first_sum
        self._parameters: Sequence[Tensor] = []
        self._replicas: Group | None = None
        self._reductions: list[Reduction] = []
        self._missing: list[set[int]] = []
        self._is_in_backward = self._is_last = False

    def take_gradients(self, parameters: Sequence[Tensor]) -> None:
        """Registers hooks that copy the gradients of these parameters into buckets."""
        self._parameters = parameters
        self.buckets = plan_buckets(parameters, self._bucket_bytes)
        for at, bucket in enumerate(self.buckets):
            for slot, index in enumerate(bucket.indices):
                parameter = parameters[index]
                if not (parameter.is_floating_point() or parameter.is_complex()):
                    continue
                # A frozen one too, as it may be trained later. A hook needs the flag, and outlasts it.
                requires_grad = parameter.requires_grad
                parameter.requires_grad_(True)
                parameter.register_post_accumulate_grad_hook(self._hook(at, slot))
                parameter.requires_grad_(requires_grad)

    def join(self, replicas: Group) -> bool:
        """Takes the ranks over which to average; the messages of those before have failed.

        Returns:
            Whether it was in a step, which is torn then.
        """
        for reduction in self._reductions:
            with suppress(CommError):
                reduction.wait()  # gloo may still write to the bucket until then
        self._reductions = []
        self._replicas = replicas
        was_in_step, self.is_in_step = self.is_in_step, False
        return was_in_step

    def begin(self, sample: Sample) -> None:
        """Begins a step, without gradients."""
        self.sample = sample
        self.is_in_step = True
        self._is_in_backward = self.is_averaged = False
        self.is_loss_divided = None
        for parameter in self._parameters:
            parameter.grad = None
        self._expect_gradients()

    @contextmanager
    def backward(self, *, is_last: bool) -> Iterator[None]:
        """Runs a backward pass of a loss that was divided by the number of ranks."""
        self._begin_backward(is_last=is_last, is_loss_divided=True)
        yield
        self._is_in_backward = False

    def average(self) -> None:
        """Averages all gradients, as they are now; waits for it."""
        self.start_all()
        for at in range(len(self.buckets)):
            self.wait(at)

    def start_all(self) -> None:
        """Starts the sums of all buckets that have not begun."""
        for missing in self._missing:
            missing.clear()
        self._start()

    def wait(self, at: int) -> None:
        """Waits for the sum of a bucket, and makes it the gradients of its parameters."""
        reach("reduce", bucket=at)
        self._reductions[at].wait()
        if at == 0:
            self._on_first_sum()
        bucket = self.buckets[at]
        used = bucket.used.tolist()
        for slot, index in enumerate(bucket.indices):
            self._parameters[index].grad = bucket.grads[slot] if used[slot] else None
        self.is_averaged = at == len(self.buckets) - 1

    def _begin_backward(self, *, is_last: bool, is_loss_divided: bool) -> None:
        if self.is_loss_divided not in (None, is_loss_divided):
            raise ConfigError(
                "expected either dp.backward(loss) or loss.backward() in a step, got both, whose "
                "gradients have different scales; call dp.backward(loss, update=False), or "
                "loss.backward() within dp.no_sync(), for all but the last"
            )
        self._on_backward()
        self._is_in_backward, self._is_last = True, is_last
        self.is_loss_divided = is_loss_divided
        self.is_averaged = False
        if not is_loss_divided:
            # Averages of an earlier pass are averaged again, with what this one adds: the average of
            # equal values is their value.
            self._expect_gradients()

    def _end_backward(self) -> None:
        """Ends a backward pass that torch's own `backward` began."""
        self._is_in_backward = False
        if self._is_last:
            self.average()

    def _expect_gradients(self) -> None:
        self._reductions = []
        self._missing = [
            {
                slot
                for slot, index in enumerate(bucket.indices)
                if self._parameters[index].requires_grad
            }
            for bucket in self.buckets
        ]

    def _hook(self, at: int, slot: int) -> Any:
        bucket = self.buckets[at]
        name = self._names[bucket.indices[slot]]

        def arrived(parameter: Tensor) -> None:
            assert parameter.grad is not None, "the hook runs behind its accumulation"
            if not self.is_in_step:
                return  # a trial before the loop: gradients go when a step begins
            if parameter.grad.layout is not torch.strided:
                raise ConfigError(
                    f"{name}: expected a dense gradient, got {parameter.grad.layout}, "
                    f"which cannot be summed in a bucket; make its module with sparse=False"
                )
            if not self._is_in_backward:
                torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)
                self._begin_backward(is_last=self.is_synchronised, is_loss_divided=False)
            if at < len(self._reductions):
                raise ConfigError(
                    f"{name}: expected its whole gradient by one backward pass a step, got more of it "
                    f"after its sum over ranks had begun; call dp.backward with update=True once a "
                    f"step, and torch.utils.checkpoint with use_reentrant=False"
                )
            if parameter.grad is not bucket.grads[slot]:
                bucket.views[slot].copy_(_part(parameter, parameter.grad))
                parameter.grad = bucket.grads[slot]
                bucket.used[slot] = 1
            if self._is_last:
                self._missing[at].discard(slot)  # a layer that is used twice comes here twice
                self._start()

        return arrived

    def _start(self) -> None:
        # All ranks start their sums in the order of the buckets, whatever order gradients come in.
        replicas = self._replicas
        assert replicas is not None, "joined before a step began"
        while len(self._reductions) < len(self.buckets):
            at = len(self._reductions)
            if self._missing[at]:
                return
            bucket = self.buckets[at]
            for slot, index in enumerate(bucket.indices):
                parameter = self._parameters[index]
                if parameter.grad is None:
                    bucket.views[slot].zero_()
                    bucket.used[slot] = 0
                elif parameter.grad is not bucket.grads[slot]:  # set without a backward pass
                    bucket.views[slot].copy_(_part(parameter, parameter.grad))
                    bucket.used[slot] = 1
            self.sample.take(at, bucket.buffer)
            if not self.is_loss_divided:
                bucket.buffer.div_(replicas.world_size)
            reach("start", bucket=at)
            self._reductions.append(start_all_reduce(replicas, bucket.buffer))


def _part(parameter: Any, grad: Any) -> Tensor:
    """This rank's part of a gradient, placed as its parameter is."""
    if getattr(grad, "placements", None) != getattr(parameter, "placements", None):
        grad = grad.redistribute(placements=parameter.placements)
    return local(grad)
