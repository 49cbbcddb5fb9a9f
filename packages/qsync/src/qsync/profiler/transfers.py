"""The gradient buckets of `DistributedDataParallel`, and how long their all-reduces take."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import torch
from torch import nn

from qsync.planner.replayer import GradientBuckets
from qsync.runtime.modules import list_operators
from shared.comms import Group, all_reduce, barrier
from shared.topology import Link, fit_link

__all__ = ["fit_all_reduce", "list_buckets", "split_parameters"]

# As DDP has them by default.
_FIRST_BUCKET_BYTES = 2**20
_BUCKET_BYTES = 25 * 2**20
_NUM_REPEATS = 5


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
        transfer_s.append(link.time_s(sum(each.numel() * each.element_size() for each in bucket)))
    return GradientBuckets(ops=buckets, transfer_s=transfer_s)


def split_parameters(model: nn.Module) -> Iterator[list[nn.Parameter]]:
    """Yields the trained parameters of each bucket: in reverse order, the first one small."""
    bucket: list[nn.Parameter] = []
    num_bytes, limit_bytes = 0, _FIRST_BUCKET_BYTES
    for parameter in reversed([each for each in model.parameters() if each.requires_grad]):
        bucket.append(parameter)
        num_bytes += parameter.numel() * parameter.element_size()
        if num_bytes >= limit_bytes:
            yield bucket
            bucket, num_bytes, limit_bytes = [], 0, _BUCKET_BYTES
    if bucket:
        yield bucket


def fit_all_reduce(device: torch.device, max_bytes: int) -> Link:
    """Measures all-reduces of all ranks; every rank calls it and gets the same fit.

    Args:
        device: of the gradients.
        max_bytes: bytes of the largest bucket.
    """
    samples = []
    for num_bytes in sorted({2**14, 2**18, max(max_bytes // 4, 2**19), max(max_bytes, 2**20)}):
        tensor = torch.zeros(num_bytes // 4, device=device)
        times = [_time_all_reduce(tensor) for _ in range(_NUM_REPEATS)]
        samples.append((num_bytes, float(torch.tensor(times[1:]).median())))
    return fit_link(samples, is_quiet=True).link


def _time_all_reduce(tensor: torch.Tensor) -> float:
    """Seconds of the rank that came last, which did not wait for others."""
    group = Group.world()
    barrier(group)
    started = time.perf_counter()
    all_reduce(group, tensor)
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)
    seconds = torch.tensor(time.perf_counter() - started, dtype=torch.float64).to(tensor.device)
    all_reduce(group, seconds, "min")
    return float(seconds)


def _find_owners(model: nn.Module, names: Sequence[str]) -> dict[int, str]:
    """The operator of each parameter; others belong to the operator whose gradient comes next."""
    operators = list_operators(model)
    owners = {
        id(parameter): name
        for name in names
        for parameter in operators[name].parameters(recurse=False)
    }
    latest = names[0]
    for parameter in model.parameters():
        latest = owners.setdefault(id(parameter), latest)
    return owners
