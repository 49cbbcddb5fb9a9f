"""Data-parallel workers on one stream: each trains a slice of every batch and writes all rows.

A batch reads the memory as of the events before it, so that a slice reads the same rows as the
whole batch. The rows that slices write are merged in order of events: up to rounding, the result is
that of one worker with the whole batch. (MSPipe's public code writes only the first worker's rows.)

Only the training thread communicates, in lockstep, so that the other threads may run ahead by
different amounts. Therefore the nodes that a batch writes are found without communication; each
worker has the whole stream.
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
    """The slices of a batch, one for each worker, and the communication between workers.

    Args:
        group: group of all workers; None for a single process.

    Attributes:
        rank: this worker's rank.
        size: number of workers.
    """

    def __init__(self, group: Group | None) -> None:
        self._group = group
        self.rank, self.size = (0, 1) if group is None else (group.rank, group.world_size)

    def slice(self, batch: Batch) -> Batch:
        """This worker's contiguous share of a batch's events; may be empty for small batches."""
        if self._group is None:
            return batch
        begin, end = (len(batch.events) * at // self.size for at in (self.rank, self.rank + 1))
        return replace(batch, events=batch.events[begin:end], negatives=batch.negatives[begin:end])

    def check_memory(self, memory: NodeMemory) -> None:
        """Checks that no two workers share a memory: a slower one would overwrite newer rows.

        Raises:
            ConfigError: two workers use the same shared memory or server.
        """
        if self._group is None:
            return
        is_shared = memory.place.startswith(("shm:", "tcp:"))
        here = torch.tensor([crc32(memory.place.encode()) if is_shared else -1 - self.rank])
        found = torch.stack(all_gather(self._group, here.to(self._group.device)))[:, 0].tolist()
        if len(set(found)) < len(found):
            raise ConfigError(
                f"group: expected a memory of its own for each of {self.size} workers, got one "
                f"that several share, place={memory.place!r} here; use place='cpu', or a name or "
                f"server for each"
            )

    def fingerprint(self, batch: Batch) -> Tensor | None:
        """Sums that identify a batch, to compare those of all workers; None for a single worker."""
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
            DataError: they are not, or a weight is not finite.
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
        """Merges the rows that all workers write, one row per node.

        Args:
            written: nodes that the whole batch writes, in ascending order.
            nodes: those of them that this slice writes.
            rows: rows of `nodes`, with the slice's messages.
            num_new: number of each row's messages that came from this slice.
            is_end: [num_here], whether the slice has an event of the node, not only mail for it.
            layout: layout of a row.

        Returns:
            Rows of `written`, the same on all workers.
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
            # Contiguous, because reading times as pairs of words requires it.
            later = part[:, :-3].clone(memory_format=torch.contiguous_format).view(torch.float32)
            both = layout.unpack(merged[place])
            joined = layout.pack(_join(both, layout.unpack(later), num_new, is_end))
            # In places not written yet `joined` is not a valid row: take `later`.
            merged[place] = torch.where(is_there[place, None], joined, later)
            is_there[place] = True
        return merged

    def gather(self, slices: Tensor) -> Tensor:
        """Concatenates the slices of all workers."""
        if self._group is None:
            return slices
        return torch.cat(all_gather_v(self._group, slices))

    def average(self, loss: Tensor, model: nn.Module) -> None:
        """Has `loss.backward()` replace gradients by their means over all workers at its end."""
        if self._group is None:
            return
        group = self._group

        def average_gradients() -> None:
            grads = [p.grad for p in model.parameters() if p.grad is not None]
            if not grads:
                return  # torch.autograd.grad, which leaves p.grad unset
            flat = torch.cat([grad.flatten() for grad in grads])
            all_reduce(group, flat)
            flat /= self.size
            for grad, mean in zip(grads, flat.split([g.numel() for g in grads]), strict=True):
                grad.copy_(mean.view_as(grad))

        def last(grad: Tensor) -> None:
            del grad
            engine: Any = Variable._execution_engine  # as torch's DistributedDataParallel does
            engine.queue_callback(average_gradients)

        loss.register_hook(last)


def _join(before: State, later: State, num_new: Tensor, is_end: Tensor) -> State:
    """Rows updated with a later slice's states of its events' ends, and with its new messages."""
    memory = torch.where(is_end[:, None], later.memory, before.memory)
    times = torch.where(is_end, later.memory_times, before.memory_times)
    if before.mail_times.ndim == 1:  # one message a node: the later one
        return State(memory, times, later.mail, later.mail_times)
    slots = before.mail_times.shape[1]
    # Slot j is taken from [earlier messages | later slice's messages], shifted by num_new slots.
    source = torch.arange(slots, device=num_new.device) + num_new[:, None]
    source = torch.where(source < slots, source, source - num_new[:, None] + slots)
    mail_times = torch.cat([before.mail_times, later.mail_times], 1).gather(1, source)
    wide = source[..., None].expand(-1, -1, later.mail.shape[2])
    return State(memory, times, torch.cat([before.mail, later.mail], 1).gather(1, wide), mail_times)
