"""Runs micro-batches through the stages of a pipeline, each on its rank.

One forward, one backward (PipeDream-Flush, arXiv 2006.09503; the 1F1B of Megatron-LM, 2104.04473):
a stage first runs as many forward passes as there are stages after it and then alternates, which
bounds the activations that it stores. Where both directions meet, one round sends and receives at
once, because two neighbours that both only send would deadlock. Where all ranks know each
micro-batch's shape beforehand, micro-batches may differ and no header is sent; else one header a run
announces to each stage what all micro-batches of the stage before look like.
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

__all__ = ["HEADER_WORDS", "AfterBackward", "ForwardPass", "States", "run_1f1b", "run_forward"]

ForwardPass = Callable[[int, Tensor | None], Tensor]
"""A stage's computation: function of a micro-batch's index and the states that the stage before
sent, None on the first stage; returns the states for the next stage, on the last one the result."""

AfterBackward = Callable[[int, Tensor | None], None]
"""Called with a micro-batch's index once its backward pass has ended, and with the gradient of what
the stage before sent, which is about to be sent back; None on the first stage."""


def run_1f1b(
    group: Group | None,
    shapes: Sequence[Sequence[int]] | int,
    forward: ForwardPass,
    *,
    dtype: torch.dtype | None = None,
    after_backward: AfterBackward | None = None,
) -> None:
    """Forward and backward passes of micro-batches; gradients are added to the parameters'.

    Every rank of the group calls it. At most as many micro-batches' activations are alive as
    there are stages from this one to the last.

    Args:
        group: the ranks of all stages, in order; None if there is one stage.
        shapes: of the states that pass between stages, for each micro-batch; equal on all stages.
            Or the number of micro-batches: then each stage announces its states' shape and type,
            the same for all micro-batches, with the first of them. Without any micro-batch, nothing
            is computed or sent.
        forward: this stage's computation; on the last stage it returns the micro-batch's loss, a
            scalar. The losses' sum is minimised.
        dtype: of the states that pass between stages, which lie on the group's device; None where
            shapes are announced.
        after_backward: called after each backward pass, in order.

    Raises:
        ConfigError: this process is not in the group.
        DataError: `forward` returned states of another shape or type than the next stage expects.
        CommError: a stage died or the timeout passed.
    """
    stage = Stage(group, shapes, dtype)
    kept: deque[KeptMicroBatch] = deque()
    total = shapes if isinstance(shapes, int) else len(shapes)
    ahead = min(stage.num_later, total)

    def backward(one: KeptMicroBatch, grad: Tensor | None) -> Tensor | None:
        done = run_backward(one, grad)
        if after_backward is not None:
            after_backward(one.k, done)
        return done

    for k in range(ahead):
        kept.append(stage.forward(k, stage.exchange_with_previous(None, k), forward))
        stage.exchange_with_next(kept[-1].out, None)
    x = stage.exchange_with_previous(None, ahead) if ahead < total else None
    for k in range(ahead, total):
        kept.append(stage.forward(k, x, forward))
        grad = stage.exchange_with_next(kept[-1].out, kept[0].out)
        done = backward(kept.popleft(), grad)
        x = stage.exchange_with_previous(done, k + 1 if k + 1 < total else None)
    while kept:
        grad = stage.exchange_with_next(None, kept[0].out)
        done = backward(kept.popleft(), grad)
        stage.exchange_with_previous(done, None)


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
    """Inputs of a micro-batch's backward pass: its index, the stage's input, its output or loss."""

    k: int
    x: Tensor | None
    out: Tensor


class Stage:
    """One stage's messages to and from its neighbours; none beyond the pipeline's ends.

    Attributes:
        num_later: number of stages after this one.
    """

    def __init__(
        self,
        group: Group | None,
        shapes: Sequence[Sequence[int]] | int,
        dtype: torch.dtype | None,
    ) -> None:
        self._group = group
        self._received = self._sent = None if isinstance(shapes, int) else States(shapes, dtype)
        self.num_later = 0 if group is None else group.world_size - 1 - group.rank

    def forward(self, k: int, x: Tensor | None, forward: ForwardPass, /) -> KeptMicroBatch:
        """Computes a micro-batch, and checks what is to be sent, or announces it."""
        out = forward(k, x)
        if self._group is not None and self.num_later:
            if self._sent is None:
                self._sent = States(out.shape, out.dtype)
                header = self._sent.to_header().to(self._group.device)
                self._exchange(self._group, self._group.rank + 1, header, None)
            self._sent.check(k, out)
        return KeptMicroBatch(k, x, out)

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
            if self._received is None:
                header = torch.empty(HEADER_WORDS, dtype=torch.int64, device=self._group.device)
                self._exchange(self._group, self._group.rank - 1, None, header)
                self._received = States.from_header(header)
            x = self._received.empty(k, self._group.device)
        self._exchange(self._group, self._group.rank - 1, grad, x)
        return None if x is None else x.requires_grad_(torch.is_grad_enabled())

    @staticmethod
    def _exchange(group: Group, peer: int, send: Tensor | None, recv: Tensor | None) -> None:
        item = Round(send_to=peer, send=send, recv_from=peer, recv=recv)
        post_rounds(group, [item], "pipeline", op="pipeline").wait_all()


class States:
    """What the messages of a boundary look like.

    Args:
        shapes: for each micro-batch, or the shape of all.
        dtype: of all.
    """

    def __init__(
        self, shapes: Sequence[Sequence[int]] | torch.Size, dtype: torch.dtype | None
    ) -> None:
        self._shapes, self._dtype = shapes, dtype

    def shape(self, k: int) -> torch.Size:
        """Of a micro-batch's states."""
        return self._shapes if isinstance(self._shapes, torch.Size) else torch.Size(self._shapes[k])

    def empty(self, k: int, device: torch.device) -> Tensor:
        """A tensor to receive a micro-batch's states."""
        return torch.empty(self.shape(k), dtype=self._dtype, device=device)

    def check(self, k: int, out: Tensor) -> None:
        """Raises a DataError where states do not look like this."""
        if out.shape != self.shape(k) or out.dtype != self._dtype:
            raise DataError(
                f"micro-batch {k}: expected states {list(self.shape(k))} of {self._dtype} for the next "
                f"stage, got {list(out.shape)} of {out.dtype}; give the runner the shape and type "
                f"that this stage returns"
            )

    def to_header(self) -> Tensor:
        """The shape and type of all states as a message."""
        assert isinstance(self._shapes, torch.Size), "announced: one shape for all micro-batches"
        if len(self._shapes) > HEADER_WORDS - 2 or self._dtype not in _ANNOUNCED:
            raise DataError(
                f"expected states of at most {HEADER_WORDS - 2} dimensions and a type among "
                f"{', '.join(map(str, _ANNOUNCED))}, got {list(self._shapes)} of {self._dtype}; "
                f"return others from this stage"
            )
        words = [_ANNOUNCED.index(self._dtype), len(self._shapes), *self._shapes]
        return torch.tensor(words + [0] * (HEADER_WORDS - len(words)))

    @staticmethod
    def from_header(header: Tensor) -> States:
        """What a stage announced."""
        dtype, num_dims, *dims = header.tolist()
        return States(torch.Size(dims[:num_dims]), _ANNOUNCED[dtype])


HEADER_WORDS = 10
_ANNOUNCED = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def run_backward(kept: KeptMicroBatch, grad: Tensor | None) -> Tensor | None:
    """Runs the backward pass of a stage; returns the gradient of its input, if it received one."""
    kept.out.backward(grad)
    if kept.x is None:
        return None
    # An output that does not depend on the input leaves no gradient, and one is waited for.
    return torch.zeros_like(kept.x) if kept.x.grad is None else kept.x.grad.contiguous()
