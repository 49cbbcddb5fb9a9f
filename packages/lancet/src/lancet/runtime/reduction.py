"""A sum over ranks by rounds on the lane of the exchanges, so that both share one queue.

A ring: chunks of the tensor are added up on their way around, then sent around once more, in
2 (n - 1) rounds of 1 / n of the tensor. The order of the additions depends on nothing but the
ranks, and all ranks get the same bits.
"""

from __future__ import annotations

from torch import Tensor

from shared.comms import Group, Round, post_rounds
from shared.comms.collectives import start_all_reduce

__all__ = ["PendingSum"]


class PendingSum:
    """A sum in progress.

    Args:
        group: ranks that add up their tensors.
        tensor: this rank's, contiguous; overwritten by the sum.
        phase: name of the sum, for the ledger and for errors.
    """

    def __init__(self, group: Group, tensor: Tensor, phase: str) -> None:
        self._sum = tensor
        if group.backend == "nccl":
            self._wait = start_all_reduce(group, self._sum).wait
        else:
            self._wait = post_rounds(
                group, _ring(group, self._sum), phase, op="all_reduce"
            ).wait_all

    def wait(self) -> Tensor:
        """Waits for the sum; on a GPU, its stream does.

        Raises:
            CommError: a rank died or the timeout passed; names rank and phase.
        """
        self._wait()
        return self._sum


def _ring(group: Group, tensor: Tensor) -> list[Round]:
    size, rank = group.world_size, group.rank
    flat = tensor.view(-1)
    length = -(-len(flat) // size)
    chunks = [flat[i * length : (i + 1) * length] for i in range(size)]
    # What came in a round is added up in the next one, while the other buffer is written to.
    buffers = flat.new_empty(min(size - 1, 2), length)
    received = [
        buffers[step % 2, : len(chunks[(rank - step - 1) % size])] for step in range(size - 1)
    ]

    def make(step: int) -> Tensor:
        """The chunk to send in a round, after adding to it what came in the round before."""
        chunk = chunks[(rank - step) % size]
        return chunk.add_(received[step - 1]) if 0 < step < size else chunk

    return [
        Round(
            send_to=(rank + 1) % size,
            send=lambda step=step: make(step),
            recv_from=(rank - 1) % size,
            recv=received[step] if step < size - 1 else chunks[(rank - step - 1) % size],
        )
        for step in range(2 * (size - 1))
    ]
