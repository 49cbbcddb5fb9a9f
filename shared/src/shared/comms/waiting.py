"""Waits for gloo's collectives that end when their world is left, whatever gloo says.

When a connection ends, gloo fails the messages that wait for the other side, but forgets a send that is
queued because the socket did not take it: whoever waits for it waits for the timeout of a message.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

from shared.errors import CommError

__all__ = ["note_severed", "wait", "wait_in"]

_LOOK = timedelta(milliseconds=50)
_GRACE_S = 0.1
"""What gloo does not forget has failed by then."""

_severed: weakref.WeakKeyDictionary[dist.ProcessGroup, float] = weakref.WeakKeyDictionary()
_unended: list[tuple[dist.ProcessGroup, dist.Work]] = []


def note_severed(process_groups: Iterable[dist.ProcessGroup]) -> None:
    """Has waits for messages of these groups end soon."""
    now_s = time.monotonic()
    for process_group in process_groups:
        _severed.setdefault(process_group, now_s)


def wait(work: dist.Work, process_group: dist.ProcessGroup) -> None:
    """Waits for the end of a collective of a gloo group.

    Raises:
        RuntimeError: gloo's, if a peer died or the timeout passed.
        CommError: the world was left.
    """
    while True:
        try:
            work.wait(_LOOK)
        except RuntimeError:
            if work.is_completed():
                work.wait()  # it may have ended between; else it raises what happened
                return
            since_s = _severed.get(process_group)
            if since_s is not None and time.monotonic() - since_s > _GRACE_S:
                # A group that nobody refers to waits for its threads, one of which never ends.
                _unended.append((process_group, work))
                raise CommError("the world was left while a message was under way") from None
        else:
            return


def wait_in(module: nn.Module) -> None:
    """Has FSDP2 wait for the messages of a module, and of those in it, by `wait`; over gloo only."""
    from torch.distributed.fsdp import FSDPModule  # slow, and whoever has such a module has it

    for one in module.modules():
        if isinstance(one, FSDPModule):
            # Not where a module has several meshes.
            with suppress(ValueError):
                one.set_custom_all_gather(_AllGather())
                one.set_custom_reduce_scatter(_ReduceScatter())


class _Allocates:
    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Memory for a message."""
        return torch.empty(*size, dtype=dtype, device=device)


class _AllGather(_Allocates):
    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> None:
        """Gathers, at once."""
        work = dist.all_gather_into_tensor(output_tensor, input_tensor, group, async_op=True)
        wait(work, group)


class _ReduceScatter(_Allocates):
    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Reduces and scatters, at once."""
        work = dist.reduce_scatter_tensor(output_tensor, input_tensor, op, group, async_op=True)
        wait(work, group)
