"""Runs micro-batches through the stages of a pipeline, or through a model with one stage.

One forward, one backward (PipeDream-Flush, arXiv 2006.09503; the 1F1B of Megatron-LM, 2104.04473):
a stage first runs as many forward passes as there are stages after it and then alternates, which
bounds the activations that it stores. Where both directions meet, one round sends and receives at
once, because two neighbours that both only send would deadlock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hybridflow.models.decoder import Attend, Decoder, attend_causally
from shared.comms.courier import post_rounds
from shared.comms.group import Group
from shared.comms.rounds import Round

__all__ = ["run_forward", "train"]


class KeptMicroBatch(NamedTuple):
    """Inputs of a micro-batch's backward pass: the stage's input, and its output or loss."""

    x: Tensor
    out: Tensor


def train(
    model: Decoder,
    group: Group | None,
    micro_batches: Sequence[Tensor],
    loss_of: Callable[[int, Tensor], Tensor],
) -> None:
    """Forward and backward passes of micro-batches; gradients are added to the parameters'.

    Args:
        model: this rank's stage.
        group: the ranks of all stages, in order; None if there is one stage.
        micro_batches: tokens int64 [rows, width] of each; the same on all stages.
        loss_of: function of a micro-batch's index and hidden states [rows, width, dim] to its
            loss, called on the last stage; the sum over micro-batches is minimised.
    """
    if group is None:
        for k, tokens in enumerate(micro_batches):
            loss_of(k, model(tokens)).backward()
        return
    stage = Stage(model, group, micro_batches)
    kept: deque[KeptMicroBatch] = deque()
    total = len(micro_batches)
    ahead = min(model.shard.num_stages - 1 - model.shard.pp, total)
    for k in range(ahead):
        kept.append(stage.forward(k, stage.receive_input(k), loss_of))
        stage.send_output(kept[-1].out)
    x = stage.receive_input(ahead) if ahead < total else None
    for k in range(ahead, total):
        assert x is not None, "received before"
        kept.append(stage.forward(k, x, loss_of))
        grad = stage.exchange_with_next(kept[-1].out, kept[0].out)
        done = run_backward(kept.popleft(), grad)
        x = stage.exchange_with_previous(done, k + 1 if k + 1 < total else None)
    while kept:
        grad = stage.receive_grad(kept[0].out)
        stage.send_grad(run_backward(kept.popleft(), grad))


@torch.no_grad()
def run_forward(
    model: Decoder,
    group: Group | None,
    micro_batches: Sequence[Tensor],
    use: Callable[[int, Tensor], None],
    attend: Callable[[int], Attend] = lambda k: attend_causally,
) -> None:
    """Forward passes of micro-batches; `use` receives the hidden states on the last stage.

    `attend` returns a micro-batch's attention, by its index.
    """
    if group is None:
        for k, tokens in enumerate(micro_batches):
            use(k, model(tokens, attend(k)))
        return
    stage = Stage(model, group, micro_batches)
    for k in range(len(micro_batches)):
        out = model(stage.receive_input(k), attend(k))
        if model.shard.is_last:
            use(k, out)
        else:
            stage.send_output(out)


class Stage:
    """One stage's messages to and from its neighbours; no messages beyond the pipeline's ends."""

    def __init__(self, model: Decoder, group: Group, micro_batches: Sequence[Tensor]) -> None:
        self._model, self._group, self._micro_batches = model, group, micro_batches
        self._is_first, self._is_last = model.shard.is_first, model.shard.is_last
        self._next, self._previous = group.rank + 1, group.rank - 1

    def forward(
        self, k: int, x: Tensor, loss_of: Callable[[int, Tensor], Tensor]
    ) -> KeptMicroBatch:
        out = self._model(x)
        return KeptMicroBatch(x, loss_of(k, out) if self._is_last else out)

    def receive_input(self, k: int) -> Tensor:
        if self._is_first:
            return self._micro_batches[k]
        x = self._empty_input(k)
        self._round(self._previous, None, x)
        return x.requires_grad_(torch.is_grad_enabled())

    def send_output(self, out: Tensor) -> None:
        if not self._is_last:
            self._round(self._next, out.detach().contiguous(), None)

    def receive_grad(self, of: Tensor) -> Tensor | None:
        if self._is_last:
            return None
        grad = torch.empty_like(of, memory_format=torch.contiguous_format)
        self._round(self._next, None, grad)
        return grad

    def send_grad(self, grad: Tensor | None) -> None:
        if grad is not None:
            self._round(self._previous, grad.contiguous(), None)

    def exchange_with_next(self, out: Tensor, of: Tensor) -> Tensor | None:
        """Sends a micro-batch's output, and receives the gradient of an earlier one's."""
        if self._is_last:
            return None
        grad = torch.empty_like(of, memory_format=torch.contiguous_format)
        self._round(self._next, out.detach().contiguous(), grad)
        return grad

    def exchange_with_previous(self, grad: Tensor | None, k: int | None) -> Tensor | None:
        """Sends a micro-batch's gradient, and receives the input of a later one, if any."""
        if self._is_first:
            return None if k is None else self._micro_batches[k]
        assert grad is not None, "its input was received, so it has a gradient"
        x = None if k is None else self._empty_input(k)
        self._round(self._previous, grad.contiguous(), x)
        return None if x is None else x.requires_grad_()

    def _empty_input(self, k: int) -> Tensor:
        rows, width = self._micro_batches[k].shape
        cos = self._model.cos
        size = (rows, width, self._model.config.hidden_size)
        return torch.empty(size, dtype=cos.dtype, device=cos.device)

    def _round(self, peer: int, send: Tensor | None, recv: Tensor | None) -> None:
        item = Round(send_to=peer, send=send, recv_from=peer, recv=recv)
        post_rounds(self._group, [item], "pipeline", op="pipeline").wait_all()


def run_backward(kept: KeptMicroBatch, grad: Tensor | None) -> Tensor | None:
    """Runs the backward pass of a stage; returns the gradient of its input."""
    kept.out.backward(grad)
    return kept.x.grad
