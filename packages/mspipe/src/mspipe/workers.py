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

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from torch.autograd import Variable

from mspipe.batching import Batch
from mspipe.memory import RowLayout, State
from shared.comms import Group
from shared.comms.collectives import all_gather, all_gather_v, all_reduce
from shared.errors import DataError

__all__ = ["Workers"]


class Workers:
    """This process among those that share each batch.

    Args:
        group: all of them; None for a process alone.

    Attributes:
        size: how many there are.
    """

    def __init__(self, group: Group | None) -> None:
        self._group = group
        self.size = 1 if group is None else group.world_size

    def slice(self, batch: Batch) -> Batch:
        """This worker's events of a batch, one run of them; none where they do not suffice for all."""
        if self._group is None:
            return batch
        begin, end = (
            len(batch.events) * at // self.size for at in (self._group.rank, self._group.rank + 1)
        )
        return replace(batch, events=batch.events[begin:end], negatives=batch.negatives[begin:end])

    def check(self, index: int, num_events: int, model: nn.Module) -> None:
        """Sees to it that all workers are at the same batch with the same weights.

        Raises:
            DataError: they are not.
        """
        if self._group is None:
            return
        with torch.no_grad():
            weights = [parameter.double().sum() for parameter in model.parameters()]
        here = torch.stack(
            [*weights, weights[0].new_tensor(index), weights[0].new_tensor(num_events)]
        )
        found = torch.stack(all_gather(self._group, here))
        for name, part in (("weights", found[:, :-2]), ("batches", found[:, -2:])):
            if not torch.equal(part, part[:1].expand_as(part)):
                raise DataError(
                    f"batch {index}: expected the same {name} on all workers, got others on worker "
                    f"{int((part != part[0]).any(1).nonzero()[0, 0])} than on 0; start all from one "
                    f"seed or checkpoint, give all the same batches, and step after backward()"
                )

    def merged(
        self,
        written: Int64[Tensor, " num_written"],
        nodes: Int64[Tensor, " num_here"],
        rows: Float[Tensor, "num_here words"],
        num_new: Int64[Tensor, " num_here"],
        is_end: Tensor,
        layout: RowLayout,
    ) -> Float[Tensor, "num_written words"]:
        """What all workers write, of every node once.

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
            joined = layout.pack(_joined(both, layout.unpack(later), num_new, is_end))
            # Not where: what was not there yet may be no number.
            merged[place] = torch.where(is_there[place, None], joined, later)
            is_there[place] = True
        return merged

    def gathered(self, slices: Tensor) -> Tensor:
        """The slices of all workers, one after another."""
        if self._group is None:
            return slices
        return torch.cat(all_gather_v(self._group, slices))

    def average(self, loss: Tensor, model: nn.Module) -> None:
        """Has `loss.backward()` end with the mean of all workers' gradients."""
        if self._group is None:
            return
        group = self._group

        def averaged() -> None:
            grads = [p.grad for p in model.parameters() if p.grad is not None]
            flat = torch.cat([grad.flatten() for grad in grads])
            all_reduce(group, flat)
            flat /= self.size
            for grad, mean in zip(grads, flat.split([g.numel() for g in grads]), strict=True):
                grad.copy_(mean.view_as(grad))

        def last(grad: Tensor) -> None:
            del grad
            engine: Any = Variable._execution_engine  # as torch's own data parallelism does it
            engine.queue_callback(averaged)

        loss.register_hook(last)


def _joined(before: State, later: State, num_new: Tensor, is_end: Tensor) -> State:
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
