"""The exchanges as differentiable functions.

An aggregation and the linear layer after it are one function: the layer multiplies rows without
remote neighbours while halo rows are in transit, and computes the gradients of its own parameters
while input gradients are in transit.

Sending rows and receiving the halo are two functions, so that what a module computes between them
overlaps with the sending in both directions: autograd runs later nodes first, so the backward pass
of receiving starts sending gradients, the nodes in between run, and the backward pass of sending
waits for the gradients.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from adaqp.messages.channel import Channel, ChannelSide
from adaqp.messages.exchange import Flight
from adaqp.messages.runtime import Messages
from adaqp.partitioning.part import Operator

__all__ = ["HaloInFlight", "aggregate", "aggregate_linear", "send_rows"]


class _Aggregate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        op: Operator,
        transposed: Operator | None,
        messages: Messages,
        channel: Channel,
        anchor: Tensor,
    ) -> Tensor:
        ctx.op, ctx.transposed, ctx.messages, ctx.channel = op, transposed, messages, channel
        return messages.aggregate(x, op, channel.forward)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        messages, side = ctx.messages, ctx.channel.backward
        messages.end_step()
        back = None
        if ctx.needs_input_grad[0]:
            back = _send_back(ctx, grads[0].contiguous(), side)
        return back, None, None, None, None, None


def _send_back(
    ctx: Any, grad: Tensor, side: ChannelSide, meanwhile: Callable[[], None] | None = None
) -> Tensor:
    """A^T grad, pulled or pushed; `meanwhile` is called while gradients are in transit."""
    if ctx.transposed is None:
        return ctx.messages.push(grad, ctx.op, side, meanwhile)
    pulled = None if meanwhile is None else lambda _: meanwhile()
    return ctx.messages.aggregate(grad, ctx.transposed, side, pulled)


def aggregate(
    x: Tensor, op: Operator, transposed: Operator | None, messages: Messages, channel: Channel
) -> Tensor:
    """A x, [num_local, dim], differentiable.

    Args:
        x: float tensor [num_local, dim].
        op: the operator A.
        transposed: A^T, with which the backward pass pulls output gradients; None: it pushes the
            halo's input gradients.
        messages: executes the exchange.
        channel: the exchange's channel, from `messages.next_channel()`.
    """
    return _Aggregate.apply(x, op, transposed, messages, channel, messages.anchor)


class _AggregateLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        matrix: Tensor,
        bias: Tensor,
        op: Operator,
        transposed: Operator | None,
        messages: Messages,
        channel: Channel,
    ) -> Tensor:
        num_central = messages.share.num_central
        out = x.new_empty(len(x), matrix.shape[1])

        def central_rows(mixed: Tensor) -> None:
            torch.addmm(bias, mixed[:num_central], matrix, out=out[:num_central])

        mixed = messages.aggregate(x, op, channel.forward, central_rows)
        torch.addmm(bias, mixed[num_central:], matrix, out=out[num_central:])
        ctx.op, ctx.transposed, ctx.messages, ctx.channel = op, transposed, messages, channel
        ctx.save_for_backward(mixed, matrix)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        messages, side = ctx.messages, ctx.channel.backward
        messages.end_step()
        mixed, matrix = ctx.saved_tensors
        grad = grads[0].contiguous()
        own: list[Tensor] = []

        def layers_own() -> None:
            own.extend((mixed.T @ grad, grad.sum(0)))

        back = _send_back(ctx, grad @ matrix.T, side, layers_own)
        return back, *own, None, None, None, None


def aggregate_linear(
    x: Tensor,
    matrix: Tensor,
    bias: Tensor,
    op: Operator,
    transposed: Operator | None,
    messages: Messages,
    channel: Channel,
) -> Tensor:
    """A x matrix + bias, [num_local, out_dim], differentiable in all three.

    Args:
        x: float tensor [num_local, in_dim].
        matrix: [in_dim, out_dim]; bias: [out_dim].
        op, transposed, messages, channel: as in `aggregate`.
    """
    return _AggregateLinear.apply(x, matrix, bias, op, transposed, messages, channel)


class _SendRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, state: "HaloInFlight", anchor: Tensor) -> Tensor:
        ctx.state = state
        state.needs_grad = ctx.needs_input_grad[0]
        state.flight = state.messages.send(x, state.channel.forward, None)
        return x.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None, None]:
        state = ctx.state
        if not state.needs_grad:
            return None, None, None
        back = state.flight.collect()
        out = back.new_zeros(state.messages.share.num_local, back.shape[1])
        return out.index_add_(0, state.messages.share.pull.send_rows, back), None, None


class _ReceiveHalo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, token: Tensor, state: "HaloInFlight") -> Tensor:
        ctx.state = state
        return state.flight.collect()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        state = ctx.state
        state.messages.end_step()
        if state.needs_grad:
            rows = grads[0].contiguous()
            state.flight = state.messages.send(rows, state.channel.backward, None)
        return grads[0].new_zeros(()), None


class HaloInFlight:
    """Halo rows in transit; `receive()` waits for them."""

    def __init__(self, messages: Messages, channel: Channel) -> None:
        self.messages, self.channel = messages, channel
        self.flight: Flight
        self.token: Tensor
        self.needs_grad = False

    def receive(self) -> Tensor:
        """The halo rows [num_halo, dim], differentiable; call it once."""
        return _ReceiveHalo.apply(self.token, self)


def send_rows(x: Tensor, messages: Messages, channel: Channel) -> HaloInFlight:
    """Sends the rows of `x` [num_local, dim] that other ranks need; never waits."""
    state = HaloInFlight(messages, channel)
    state.token = _SendRows.apply(x, state, messages.anchor)
    return state
