"""The exchanges as differentiable functions.

A linear layer after an aggregation is one function with it: the rows without remote neighbours pass
through the layer while halo rows travel, and the layer's own gradient is computed while gradients
travel back.

`send_rows` and `receive_halo` are two functions so that what a module computes between them overlaps
with the sending in both directions: autograd runs later nodes first, hence the backward pass of
`receive_halo` starts the gradients' way home, the nodes in between run, and only the backward pass
of `send_rows` waits.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from adaqp.partitioning.part import Operator

if TYPE_CHECKING:
    from adaqp.messages.exchange import Flight
    from adaqp.messages.runtime import Messages

__all__ = ["HaloInFlight", "aggregate", "aggregate_linear", "send_rows"]


class _Aggregate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        op: Operator,
        transposed: Operator | None,
        messages: "Messages",
        call: str | None,
        anchor: Tensor,
    ) -> Tensor:
        ctx.op, ctx.transposed, ctx.messages, ctx.call = op, transposed, messages, call
        return messages.aggregate(x, op, call)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        messages, call = ctx.messages, ctx.call.replace("forward", "backward")
        messages.end_step()
        back = None
        if ctx.needs_input_grad[0]:
            back = _send_back(ctx, grads[0].contiguous(), call)
        return back, None, None, None, None, None


def _send_back(
    ctx: Any, grad: Tensor, call: str, meanwhile: Callable[[], None] | None = None
) -> Tensor:
    """A^T grad, pulled or pushed; `meanwhile` is called while gradients travel."""
    if ctx.transposed is None:
        return ctx.messages.push(grad, ctx.op, call, meanwhile)
    pulled = None if meanwhile is None else lambda _: meanwhile()
    return ctx.messages.aggregate(grad, ctx.transposed, call, pulled)


def aggregate(
    x: Tensor, op: Operator, transposed: Operator | None, messages: "Messages", call: str | None
) -> Tensor:
    """A x, [num_local, dim], differentiable.

    Args:
        x: float tensor [num_local, dim].
        op: A.
        transposed: A^T, if the backward pass is to pull output gradients; None: push.
        messages: carries the exchange out.
        call: name of the exchange, None outside autograd.
    """
    return _Aggregate.apply(x, op, transposed, messages, call, messages.anchor)


class _AggregateLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        matrix: Tensor,
        bias: Tensor,
        op: Operator,
        transposed: Operator | None,
        messages: "Messages",
        call: str | None,
    ) -> Tensor:
        num_central = messages.dg.num_central
        out = x.new_empty(len(x), matrix.shape[1])

        def central_rows(mixed: Tensor) -> None:
            torch.addmm(bias, mixed[:num_central], matrix, out=out[:num_central])

        mixed = messages.aggregate(x, op, call, central_rows)
        torch.addmm(bias, mixed[num_central:], matrix, out=out[num_central:])
        ctx.op, ctx.transposed, ctx.messages, ctx.call = op, transposed, messages, call
        ctx.save_for_backward(mixed, matrix)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        messages, call = ctx.messages, ctx.call.replace("forward", "backward")
        messages.end_step()
        mixed, matrix = ctx.saved_tensors
        grad = grads[0].contiguous()
        own: list[Tensor] = []

        def layers_own() -> None:
            own.extend((mixed.T @ grad, grad.sum(0)))

        back = _send_back(ctx, grad @ matrix.T, call, layers_own)
        return back, *own, None, None, None, None


def aggregate_linear(
    x: Tensor,
    matrix: Tensor,
    bias: Tensor,
    op: Operator,
    transposed: Operator | None,
    messages: "Messages",
    call: str | None,
) -> Tensor:
    """A x matrix + bias, [num_local, out_dim], differentiable in all three.

    Args:
        x: float tensor [num_local, in_dim].
        matrix: [in_dim, out_dim]; bias: [out_dim].
        op, transposed, messages, call: as in `aggregate`.
    """
    return _AggregateLinear.apply(x, matrix, bias, op, transposed, messages, call)


class _SendRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, state: "HaloInFlight", anchor: Tensor) -> Tensor:
        ctx.state = state
        state.needs_grad = ctx.needs_input_grad[0]
        state.flight = state.messages.send(x, state.messages.dg.pull, None, state.call)
        return x.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None, None]:
        state = ctx.state
        if not state.needs_grad:
            return None, None, None
        back = state.flight.collect()
        out = back.new_zeros(state.messages.dg.num_local, back.shape[1])
        return out.index_add_(0, state.messages.dg.pull.send_rows, back), None, None


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
            call = state.call.replace("forward", "backward")
            rows = grads[0].contiguous()
            state.flight = state.messages.send(rows, state.messages.dg.push, None, call)
        return grads[0].new_zeros(()), None


class HaloInFlight:
    """Halo rows on their way; `receive()` waits for them."""

    def __init__(self, messages: "Messages", call: str | None) -> None:
        self.messages, self.call = messages, call
        self.flight: Flight
        self.token: Tensor
        self.needs_grad = False

    def receive(self) -> Tensor:
        """The halo rows [num_halo, dim], differentiable; call it once."""
        return _ReceiveHalo.apply(self.token, self)


def send_rows(x: Tensor, messages: "Messages", call: str | None) -> HaloInFlight:
    """Sends the rows of `x` [num_local, dim] that other ranks need; never waits."""
    state = HaloInFlight(messages, call)
    state.token = _SendRows.apply(x, state, messages.anchor)
    return state
