"""Runs micro-batches through the stages of a pipeline, each on its rank.

One forward, one backward (PipeDream-Flush, arXiv 2006.09503; the 1F1B of Megatron-LM, 2104.04473):
a stage first runs as many forward passes as there are stages after it and then alternates, which
bounds the activations that it stores. Where both directions meet, one round sends and receives at
once, because two neighbours that both only send would deadlock. All ranks know each micro-batch's
shape beforehand, so that micro-batches may differ and no header is sent.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from shared.comms.courier import post_rounds
from shared.comms.group import Group
from shared.comms.rounds import Round
from shared.errors import DataError

__all__ = ["ForwardPass", "run_1f1b", "run_forward"]

ForwardPass = Callable[[int, Tensor | None], Tensor]
"""A stage's computation: function of a micro-batch's index and the states that the stage before
sent, None on the first stage; returns the states for the next stage, on the last one the result."""


def run_1f1b(
    group: Group | None,
    shapes: Sequence[Sequence[int]],
    forward: ForwardPass,
    *,
    dtype: torch.dtype,
) -> None:
    """Forward and backward passes of micro-batches; gradients are added to the parameters'.

    Every rank of the group calls it. At most as many micro-batches' activations are alive as
    there are stages from this one to the last.

    Args:
        group: the ranks of all stages, in order; None if there is one stage.
        shapes: of the states that pass between stages, for each micro-batch; equal on all stages.
            Without any, nothing is computed or sent.
        forward: this stage's computation; on the last stage it returns the micro-batch's loss, a
            scalar. The losses' sum is minimised.
        dtype: of the states that pass between stages, which lie on the group's device.

    Raises:
        ConfigError: this process is not in the group.
        DataError: `forward` returned states of another shape or type than the next stage expects.
        CommError: a stage died or the timeout passed.
    """
    stage = Stage(group, shapes, dtype)
    kept: deque[KeptMicroBatch] = deque()
    total = len(shapes)
    ahead = min(stage.num_later, total)
    for k in range(ahead):
        kept.append(stage.forward(k, stage.exchange_with_previous(None, k), forward))
        stage.exchange_with_next(kept[-1].out, None)
    x = stage.exchange_with_previous(None, ahead) if ahead < total else None
    for k in range(ahead, total):
        kept.append(stage.forward(k, x, forward))
        grad = stage.exchange_with_next(kept[-1].out, kept[0].out)
        done = run_backward(kept.popleft(), grad)
        x = stage.exchange_with_previous(done, k + 1 if k + 1 < total else None)
    while kept:
        grad = stage.exchange_with_next(None, kept[0].out)
        stage.exchange_with_previous(run_backward(kept.popleft(), grad), None)


@torch.no_grad()
def run_forward(
    group: Group | None,
    shapes: Sequence[Sequence[int]],
    forward: ForwardPass,
    *,
    dtype: torch.dtype,
) -> None:
    """Forward passes of micro-batches, without gradients; what the last stage returns is dropped.

    Args:
        group: as in `run_1f1b`.
        shapes: as in `run_1f1b`.
        forward: this stage's computation.
        dtype: as in `run_1f1b`.

    Raises:
        ConfigError: as in `run_1f1b`.
        DataError: as in `run_1f1b`.
        CommError: as in `run_1f1b`.
    """
    stage = Stage(group, shapes, dtype)
    for k in range(len(shapes)):
        out = stage.forward(k, stage.exchange_with_previous(None, k), forward).out
        stage.exchange_with_next(out, None)


class KeptMicroBatch(NamedTuple):
    """Inputs of a micro-batch's backward pass: the stage's input, and its output or loss."""

    x: Tensor | None
    out: Tensor


class Stage:
    """One stage's messages to and from its neighbours; none beyond the pipeline's ends.

    Attributes:
        num_later: number of stages after this one.
    """

    def __init__(
        self, group: Group | None, shapes: Sequence[Sequence[int]], dtype: torch.dtype
    ) -> None:
        self._group, self._shapes, self._dtype = group, shapes, dtype
        self.num_later = 0 if group is None else group.world_size - 1 - group.rank

    def forward(self, k: int, x: Tensor | None, forward: ForwardPass, /) -> KeptMicroBatch:
        """Computes a micro-batch, and checks what is to be sent."""
        out = forward(k, x)
        shape = tuple(self._shapes[k])
        if self.num_later and (tuple(out.shape) != shape or out.dtype != self._dtype):
            raise DataError(
                f"micro-batch {k}: expected states {list(shape)} of {self._dtype} for the next "
                f"stage, got {list(out.shape)} of {out.dtype}; give the runner the shape and type "
                f"that this stage returns"
            )
        return KeptMicroBatch(x, out)

    def exchange_with_next(self, out: Tensor | None, of: Tensor | None) -> Tensor | None:
        """Sends a micro-batch's output, and receives the gradient of an earlier one's, if any."""
        if self._group is None or not self.num_later:
            return None
        sent = None if out is None else out.detach().contiguous()
        grad = None if of is None else torch.empty_like(of, memory_format=torch.contiguous_format)
        self._exchange(self._group, self._group.rank + 1, sent, grad)
        return grad

    def exchange_with_previous(self, grad: Tensor | None, k: int | None) -> Tensor | None:
        """Sends a micro-batch's gradient, and receives the input of a later one, if any."""
        if self._group is None or not self._group.rank:
            return None
        x = None
        if k is not None:
            shape = tuple(self._shapes[k])
            x = torch.empty(shape, dtype=self._dtype, device=self._group.device)
        self._exchange(self._group, self._group.rank - 1, grad, x)
        return None if x is None else x.requires_grad_(torch.is_grad_enabled())

    @staticmethod
    def _exchange(group: Group, peer: int, send: Tensor | None, recv: Tensor | None) -> None:
        item = Round(send_to=peer, send=send, recv_from=peer, recv=recv)
        post_rounds(group, [item], "pipeline", op="pipeline").wait_all()


def run_backward(kept: KeptMicroBatch, grad: Tensor | None) -> Tensor | None:
    """Runs the backward pass of a stage; returns the gradient of its input, if it received one."""
    kept.out.backward(grad)
    if kept.x is None:
        return None
    # An output that does not depend on the input leaves no gradient, and one is waited for.
    return torch.zeros_like(kept.x) if kept.x.grad is None else kept.x.grad.contiguous()
