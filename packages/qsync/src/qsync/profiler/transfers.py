"""The gradient buckets of `DistributedDataParallel`, their all-reduces, and steps with both."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from qsync.planner.replayer import GradientBuckets
from qsync.profiler.gradients import LossFunction
from qsync.profiler.state import in_float32, preserve_state
from qsync.runtime.modules import list_operators
from shared.comms import Group, all_reduce, barrier
from shared.comms.collectives import Reduction, start_all_reduce
from shared.topology import Link, fit_link

__all__ = [
    "BucketSums",
    "list_buckets",
    "measure_buckets",
    "split_parameters",
    "time_summed_steps",
]

# As DDP has them by default.
_FIRST_BUCKET_BYTES = 2**20
_BUCKET_BYTES = 25 * 2**20
_NUM_REPEATS = 5


def measure_buckets(model: nn.Module, names: Sequence[str]) -> GradientBuckets:
    """Measures all-reduces and lists the buckets that DDP makes; every rank calls it.

    Args:
        model: model.
        names: its operators, in the order in which they run.
    """
    buckets = list(split_parameters(model))
    largest = max(sum(each.nbytes for each in bucket) for bucket in buckets)
    return list_buckets(model, names, _fit_all_reduce(buckets[0][0].device, largest))


def list_buckets(model: nn.Module, names: Sequence[str], link: Link) -> GradientBuckets:
    """Lists the buckets that DDP makes of a model's gradients.

    Args:
        model: model.
        names: its operators, in the order in which they run.
        link: seconds of an all-reduce by its bytes.
    """
    owners = _find_owners(model, names)
    buckets, transfer_s = [], []
    for bucket in split_parameters(model):
        ops = tuple(dict.fromkeys(owners[id(each)] for each in bucket))
        buckets.append(ops)
        transfer_s.append(link.time_s(sum(each.nbytes for each in bucket)))
    return GradientBuckets(ops=buckets, transfer_s=transfer_s)


def split_parameters(model: nn.Module) -> Iterator[list[nn.Parameter]]:
    """Yields the trained parameters of each bucket: in reverse order, the first one small."""
    bucket: list[nn.Parameter] = []
    num_bytes, limit_bytes = 0, _FIRST_BUCKET_BYTES
    for parameter in reversed([each for each in model.parameters() if each.requires_grad]):
        bucket.append(parameter)
        num_bytes += parameter.nbytes
        if num_bytes >= limit_bytes:
            yield bucket
            bucket, num_bytes, limit_bytes = [], 0, _BUCKET_BYTES
    if bucket:
        yield bucket


def _fit_all_reduce(device: torch.device, max_bytes: int) -> Link:
    """Measures all-reduces of up to so many bytes; the same fit on all ranks."""
    group, samples = Group.world(), []
    for num_bytes in sorted({2**14, 2**18, max(max_bytes // 4, 2**19), max(max_bytes, 2**20)}):
        reduce = partial(all_reduce, group, torch.zeros(num_bytes // 4, device=device))
        # The rank that comes last does not wait for others.
        times = [_time(reduce, "min") for _ in range(_NUM_REPEATS)]
        samples.append((num_bytes, float(np.median(times[1:]))))
    return fit_link(samples, is_quiet=True).link


def time_summed_steps(model: nn.Module, batches: Sequence[Any], loss_fn: LossFunction) -> float:
    """Measures float32 steps that sum gradients over all ranks as DDP does; every rank calls it.

    Args:
        model: model; it is left as it was.
        batches: training batches, read in turns.
        loss_fn: returns the loss of (model, batch).

    Returns:
        The median seconds from a barrier to the slowest rank's last sum.
    """
    sums, times = BucketSums(model), []
    with preserve_state(model), in_float32(model), torch.enable_grad():
        for index in range(_NUM_REPEATS):
            for parameter in model.parameters():
                parameter.grad = None
            step = partial(sums.run, loss_fn, model, batches[index % len(batches)])
            times.append(_time(step, "max"))
    return float(np.median(times[1:]))


class BucketSums:
    """Averages gradients over ranks during a backward pass, bucket by bucket, as DDP does.

    DDP itself would take the first rank's weights, and refuse a loss function that reads attributes
    of the model.

    Args:
        model: model, alike on all ranks.
    """

    def __init__(self, model: nn.Module) -> None:
        self._group = Group.world()
        self._buckets = list(split_parameters(model))
        self._slices: dict[nn.Parameter, tuple[int, Tensor]] = {}
        self._flat = []
        for k, bucket in enumerate(self._buckets):
            self._flat.append(bucket[0].new_zeros(sum(each.numel() for each in bucket)))
            parts = self._flat[-1].split([each.numel() for each in bucket])
            for parameter, part in zip(bucket, parts, strict=True):
                self._slices[parameter] = k, part.view_as(parameter)

    def run(self, loss_fn: LossFunction, model: nn.Module, batch: Any) -> None:
        """Runs forward and backward; every rank's gradients are the ranks' mean afterwards."""
        self._missing = [len(bucket) for bucket in self._buckets]
        self._sums: list[Reduction] = []
        handles = [each.register_post_accumulate_grad_hook(self._add) for each in self._slices]
        loss_fn(model, batch).backward()
        for handle in handles:
            handle.remove()
        # A bucket with a parameter that the loss does not need.
        self._start(len(self._flat))
        for bucket, pending in zip(self._buckets, self._sums, strict=True):
            pending.wait()
            for parameter in bucket:
                if parameter.grad is not None and not parameter.grad.is_sparse:
                    parameter.grad.copy_(self._slices[parameter][1])

    def _add(self, parameter: Tensor) -> None:
        assert isinstance(parameter, nn.Parameter)
        assert parameter.grad is not None
        k, part = self._slices[parameter]
        if not parameter.grad.is_sparse:
            torch.div(parameter.grad, self._group.world_size, out=part)
        self._missing[k] -= 1
        filled = next((k for k, count in enumerate(self._missing) if count > 0), len(self._flat))
        self._start(filled)

    def _start(self, end: int) -> None:
        """Starts the sums of all buckets before the one numbered `end`: in order on all ranks."""
        for flat in self._flat[len(self._sums) : end]:
            self._sums.append(start_all_reduce(self._group, flat))


def _time(run: Callable[[], object], which: Literal["min", "max"]) -> float:
    """Seconds of the fastest or the slowest rank from a barrier on."""
    group = Group.world()
    barrier(group)
    started = time.perf_counter()
    run()
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    seconds = torch.tensor(time.perf_counter() - started, dtype=torch.float64).to(group.device)
    return float(all_reduce(group, seconds, which))


def _find_owners(model: nn.Module, names: Sequence[str]) -> dict[int, str]:
    """Maps parameters to the operator whose backward pass completes their gradient.

    A norm's parameters count with the operator registered before it, whose gradient comes next.
    """
    operators = list_operators(model)
    # A tied weight's gradient is whole when the first of its operators, the last in backward, has run.
    owners = {
        id(parameter): name
        for name in reversed(names)
        for parameter in operators[name].parameters(recurse=False)
    }
    latest = names[0]
    for parameter in model.parameters():
        latest = owners.setdefault(id(parameter), latest)
    return owners
