"""Gradients summed in chunks of micro-batches, so that several ranks get one rank's bits.

Floating-point sums depend on their order. A step's gradient is therefore defined as the sum, in order,
of chunk sums, each the sum in order of a few consecutive micro-batches' gradients. Ranks that compute
whole chunks can then add their sums in the same order. It takes one gradient buffer more.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shared.comms import Group, all_gather_v, all_to_all_v

__all__ = ["ChunkSums", "add_from_all", "split_chunks"]

Gradients = list[Tensor | None]
"""One a parameter; None where no loss depends on it."""


class ChunkSums:
    """Takes parameters' gradients after each micro-batch's backward pass.

    Args:
        parameters: whose `.grad` accumulates; None at the start.
        chunk: micro-batches in a chunk.
        num_micro_batches: of a step; the last chunk may be shorter.
        keep_apart: keep each chunk's sum, to be added with other ranks'.

    Attributes:
        sums: by chunk, in order; one, the sum of all so far, if they are not kept apart.
    """

    def __init__(
        self, parameters: Sequence[Tensor], chunk: int, num_micro_batches: int, *, keep_apart: bool
    ) -> None:
        self.sums: list[Gradients] = []
        self._parameters, self._chunk = parameters, chunk
        self._last, self._keep_apart = num_micro_batches - 1, keep_apart

    def close_micro_batch(self, k: int, messages: Sequence[Tensor] = ()) -> None:
        """The backward pass of micro-batch `k` has ended; they end in ascending order.

        Args:
            k: which.
            messages: gradients that came from a neighbour or go to one. Autograd may give a parameter a
                view of one as its gradient, and what is added to it later would change the message
                while it is sent or logged: such a gradient is copied.
        """
        kept = {message.untyped_storage().data_ptr() for message in messages}
        for parameter in self._parameters if kept else ():
            grad = parameter.grad
            if grad is None or grad.layout != torch.strided:  # a sparse one has memory of its own
                continue
            if grad.untyped_storage().data_ptr() in kept:
                parameter.grad = grad.clone()
        if (k + 1) % self._chunk and k != self._last:
            return
        grads: Gradients = [parameter.grad for parameter in self._parameters]
        for parameter in self._parameters:
            parameter.grad = None
        if self._keep_apart or not self.sums:
            self.sums.append(grads)
        else:
            self.sums[0] = [_add(*pair) for pair in zip(self.sums[0], grads, strict=True)]


def split_chunks(num_micro_batches: int, chunk: int, num_ranks: int) -> list[list[int]]:
    """Micro-batches of each rank: whole chunks that follow one another, in equal numbers up to one."""
    num_chunks = -(-num_micro_batches // chunk)
    starts = [min(num_chunks * r // num_ranks * chunk, num_micro_batches) for r in range(num_ranks)]
    return [
        list(range(start, stop))
        for start, stop in zip(starts, [*starts[1:], num_micro_batches], strict=True)
    ]


def add_from_all(group: Group, sums: Sequence[Gradients], like: Sequence[Tensor]) -> Gradients:
    """The sum, in order, of all ranks' chunk sums; the same bits on each rank.

    Each rank adds for its share of the parameters and gives the result to the others.

    Args:
        group: of the ranks, of which each has the chunks that follow its predecessor's.
        sums: this rank's, by chunk.
        like: the parameters, equal on all ranks.

    Raises:
        CommError: a rank died or the timeout passed.
    """
    shares = _share(like, group.world_size)
    has = torch.tensor(
        [[grad is not None for grad in grads] for grads in sums], dtype=torch.uint8
    ).reshape(len(sums), len(like))
    present = [each.bool() for each in all_gather_v(group, has.to(group.device))]
    sends = [
        _pack([_or_any(grads[i], like[i]) for grads in sums for i in share]) for share in shares
    ]
    mine = shares[group.rank]
    share_bytes = sum(_count_bytes(like[i]) for i in mine)
    recvs = [sends[group.rank].new_empty(len(each) * share_bytes) for each in present]
    all_to_all_v(group, [each.to(group.device) for each in sends], recvs)
    totals: Gradients = [None] * len(like)
    for is_there, data in zip(present, recvs, strict=True):
        chunks = _unpack(data, [like[i] for _ in range(len(is_there)) for i in mine])
        for at, grad in enumerate(chunks):
            chunk, i = divmod(at, len(mine))
            if is_there[chunk, mine[i]]:
                totals[mine[i]] = _add(totals[mine[i]], grad)
    packed = _pack([_or_any(totals[i], like[i]) for i in mine])
    everyone = all_gather_v(group, packed.to(group.device))
    is_used = torch.cat(present).any(0)
    for share, data in zip(shares, everyone, strict=True):
        for i, grad in zip(share, _unpack(data, [like[i] for i in share]), strict=True):
            totals[i] = grad if is_used[i] else None
    return totals


def _add(total: Tensor | None, grad: Tensor | None) -> Tensor | None:
    if total is None or grad is None:
        return grad if total is None else total
    return total.add_(grad)


def _or_any(grad: Tensor | None, like: Tensor) -> Tensor:
    """A gradient, or bytes in its place where there is none."""
    return like if grad is None else grad


def _share(like: Sequence[Tensor], num_ranks: int) -> list[list[int]]:
    """Consecutive parameters for each rank, of about as many bytes."""
    ends = torch.tensor([_count_bytes(each) for each in like]).cumsum(0).double()
    whole = float(ends[-1]) if len(like) else 1.0
    owners = [min(int(num_ranks * (float(end) - 1) / whole), num_ranks - 1) for end in ends]
    return [[i for i, owner in enumerate(owners) if owner == rank] for rank in range(num_ranks)]


def _count_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _pack(tensors: Sequence[Tensor]) -> Tensor:
    parts = [each.detach().contiguous().reshape(-1).view(torch.uint8) for each in tensors]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8)


def _unpack(data: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    parts = data.split([_count_bytes(each) for each in like])
    # Cloned, as a view of another type needs aligned bytes.
    return [
        part.clone().view(each.dtype).reshape(each.shape).to(each.device)
        for part, each in zip(parts, like, strict=True)
    ]
