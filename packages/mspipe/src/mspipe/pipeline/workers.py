"""Several workers on one stream: each trains its slice of every batch, and each learns what all wrote.

A batch reads memory as of the events before it, whoever looks at which of them, so that a slice's rows
are those of the whole batch. What slices write is merged in order of events: the result, up to rounding,
is that of one worker with the whole batch. (MSPipe's public code writes the first worker's rows only.)

Whatever is exchanged is exchanged by the thread that trains, in lockstep, so that threads which run
ahead by different amounts need not agree on anything. For that the ids that a batch writes are found
without a message; each worker has all of the stream.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from zlib import crc32

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from torch.autograd import Variable

from mspipe.data.batching import Batch
from mspipe.memory.node_memory import NodeMemory
from mspipe.memory.row_layout import RowLayout, State
from shared.comms import Group
from shared.comms.collectives import all_gather, all_gather_v, all_reduce
from shared.errors import ConfigError, DataError

__all__ = ["WorkerSlices"]


class WorkerSlices:
    """The slices of a batch, one for each worker, and what workers exchange about them.

    Args:
        group: all of them; None for a process alone.

    Attributes:
        rank, size: which one this is, of how many.
    """

    def __init__(self, group: Group | None) -> None:
        self._group = group
        self.rank, self.size = (0, 1) if group is None else (group.rank, group.world_size)

    def slice(self, batch: Batch) -> Batch:
        """This worker's events of a batch, one run of them; none where they do not suffice for all."""
        if self._group is None:
            return batch
        begin, end = (len(batch.events) * at // self.size for at in (self.rank, self.rank + 1))
        return replace(batch, events=batch.events[begin:end], negatives=batch.negatives[begin:end])

    def check_memory(self, memory: NodeMemory) -> None:
        """Checks that no two workers share a memory: one that lags would overwrite newer rows.

        Raises:
            ConfigError: two have the same shared memory or server.
        """
        if self._group is None:
            return
        is_shared = memory.place.startswith(("shm:", "tcp:"))
        here = torch.tensor([crc32(memory.place.encode()) if is_shared else -1 - self.rank])
        found = torch.stack(all_gather(self._group, here.to(self._group.device)))[:, 0].tolist()
        if len(set(found)) < len(found):
            raise ConfigError(
                f"group: expected a memory of its own for each of {self.size} workers, but several have "
                f"one in common, place={memory.place!r} here; use place='cpu', or a name or server each"
            )

    def fingerprint(self, batch: Batch) -> Tensor | None:
        """Sums by which workers compare their batches; None for a worker alone."""
        if self._group is None:
            return None
        events = batch.events
        columns = torch.stack([c.double() for c in (events.src, events.dst, events.t, events.eid)])
        weights = torch.arange(1, len(events) + 1, dtype=torch.float64) % 1009
        size = weights.new_tensor([len(events)])
        return torch.cat([(columns * weights).sum(1), batch.negatives.double().sum()[None], size])

    def check(self, index: int, fingerprint: Tensor, model: nn.Module) -> None:
        """Checks that all workers are at the same batch with the same weights.

        Raises:
            DataError: they are not, or a weight is no number.
        """
        if self._group is None:
            return
        with torch.no_grad():
            weights = torch.stack([parameter.double().sum() for parameter in model.parameters()])
        here = torch.cat([weights, weights.new_tensor([index]), fingerprint.to(weights)])
        found = torch.stack(all_gather(self._group, here))
        if not bool(found.isfinite().all()):
            raise DataError(f"batch {index}: weights are no longer finite; lower the learning rate")
        count = len(weights)
        for name, part in (("weights", found[:, :count]), ("batches", found[:, count:])):
            if not torch.equal(part, part[:1].expand_as(part)):
                raise DataError(
                    f"batch {index}: expected the same {name} on all workers, got others on worker "
                    f"{int((part != part[0]).any(1).nonzero()[0, 0])} than on 0; start all from one "
                    f"seed or checkpoint, give all the same batches, and step after out.loss.backward()"
                )

    def merge(
        self,
        written: Int64[Tensor, " num_written"],
        nodes: Int64[Tensor, " num_here"],
        rows: Float[Tensor, "num_here words"],
        num_new: Int64[Tensor, " num_here"],
        is_end: Tensor,
        layout: RowLayout,
    ) -> Float[Tensor, "num_written words"]:
        """Merges what all workers write, each node once.

        Args:
            written: the nodes that the batch writes, rising.
            nodes: those of them that this slice writes.
            rows: theirs, with the slice's messages.
            num_new: messages among each row's that came from this slice.
            is_end: [num_here], whether the slice has an event of the node, and not only mail for it.
            layout: of a row.
        """
        if self._group is None:
            return rows
        place = torch.searchsorted(written, nodes).to(rows.device)
        told = torch.stack([place, num_new.to(place), is_end.to(place)], 1).int()
        parts = all_gather_v(self._group, torch.cat([rows.view(torch.int32), told], 1))
        merged = rows.new_zeros(len(written), rows.shape[1])
        is_there = torch.zeros(len(written), dtype=torch.bool, device=rows.device)
        for part in parts:
            place, num_new, is_end = part[:, -3].long(), part[:, -2].long(), part[:, -1].bool()
            # A view would keep the stride of parts, and times are read as pairs of words.
            later = part[:, :-3].clone(memory_format=torch.contiguous_format).view(torch.float32)
            both = layout.unpack(merged[place])
            joined = layout.pack(_join(both, layout.unpack(later), num_new, is_end))
            # Not where: what was not there yet may be no number.
            merged[place] = torch.where(is_there[place, None], joined, later)
            is_there[place] = True
        return merged

    def gather(self, slices: Tensor) -> Tensor:
        """Concatenates the slices of all workers."""
        if self._group is None:
            return slices
        return torch.cat(all_gather_v(self._group, slices))

    def average(self, loss: Tensor, model: nn.Module) -> None:
        """Makes `loss.backward()` end with the mean of all workers' gradients."""
        if self._group is None:
            return
        group = self._group

        def average_gradients() -> None:
            grads = [p.grad for p in model.parameters() if p.grad is not None]
            if not grads:
                return  # somebody asked for gradients without having them kept
            flat = torch.cat([grad.flatten() for grad in grads])
            all_reduce(group, flat)
            flat /= self.size
            for grad, mean in zip(grads, flat.split([g.numel() for g in grads]), strict=True):
                grad.copy_(mean.view_as(grad))

        def last(grad: Tensor) -> None:
            del grad
            engine: Any = Variable._execution_engine  # as torch's own data parallelism does it
            engine.queue_callback(average_gradients)

        loss.register_hook(last)


def _join(before: State, later: State, num_new: Tensor, is_end: Tensor) -> State:
    """Rows with what a later slice brings: its states of ends, and its new messages behind the others."""
    memory = torch.where(is_end[:, None], later.memory, before.memory)
    times = torch.where(is_end, later.memory_times, before.memory_times)
    if before.mail_times.ndim == 1:  # one message a node: the later one
        return State(memory, times, later.mail, later.mail_times)
    slots = before.mail_times.shape[1]
    # Place j of a row is taken from [its messages | the later slice's], moved on by the new ones.
    source = torch.arange(slots, device=num_new.device) + num_new[:, None]
    source = torch.where(source < slots, source, source - num_new[:, None] + slots)
    mail_times = torch.cat([before.mail_times, later.mail_times], 1).gather(1, source)
    wide = source[..., None].expand(-1, -1, later.mail.shape[2])
    return State(memory, times, torch.cat([before.mail, later.mail], 1).gather(1, wide), mail_times)
