"""Runs one captured step in captured and in planned order, in turns, on the same batches and weights."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lancet.report import OrdersRecord
from lancet.runtime.backend import Backend
from lancet.runtime.executor import CAPTURED, PLANNED
from shared.comms import Group, barrier

__all__ = ["ORDERS", "compare_orders"]

ORDERS = (CAPTURED, PLANNED)
# The first step captures, plans and checks; the second warms up.
_NUM_UNTIMED = 2


def compare_orders(
    model: nn.Module,
    group: Group,
    backend: Backend,
    batches: Iterable[Mapping[str, Any]],
    num_turns: int,
    optimizer: Optimizer | None = None,
) -> OrdersRecord:
    """Runs forward and backward passes of both orders, the first of a turn in turns.

    Args:
        model: divided by `lancet.parallelize`.
        group: its ranks; every one calls this.
        backend: without a captured graph so far; afterwards the planned order runs on.
        batches: arguments of the model, at least two more than turns.
        num_turns: timed steps of each order.
        optimizer: takes a step after each turn; None keeps the weights.

    Raises:
        CommError: a rank died or the timeout passed.
    """
    step: Callable[..., Any] = torch.compile(model, backend=backend, fullgraph=True)
    record = OrdersRecord({order: [] for order in ORDERS}, {order: [] for order in ORDERS})
    for turn, batch in enumerate(islice(batches, num_turns + _NUM_UNTIMED)):
        gradients = []
        for order in ORDERS if turn % 2 else ORDERS[::-1]:
            backend.use_order(order)
            model.zero_grad()
            barrier(group)
            start_s = time.perf_counter()
            loss = step(**batch).loss
            loss.backward()
            barrier(group)
            if turn >= _NUM_UNTIMED:
                record.step_s[order].append(time.perf_counter() - start_s)
                record.waits_s[order].append(backend.report().exposed_s)
            gradients.append([_bits(p.grad) for p in model.parameters() if p.grad is not None])
        record.equal.extend(map(torch.equal, *gradients))
        record.losses.append(float(loss.detach()))
        if optimizer is not None:
            optimizer.step()
    backend.use_order(PLANNED)
    model.zero_grad()
    return record


def _bits(gradient: Tensor) -> Tensor:
    """A copy of this rank's part as bytes, so that NaNs compare too."""
    own = gradient.to_local() if isinstance(gradient, DTensor) else gradient
    return own.detach().clone().contiguous().view(-1).view(torch.uint8)
