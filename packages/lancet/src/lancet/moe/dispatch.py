"""Brings tokens to the ranks of their experts and the results back.

Each (token, expert) pair is a row. Rows are sorted by expert, so that a rank's rows for another rank
are neighbours, and travel in all-to-alls of uneven, data-dependent sizes: first the numbers of rows,
then the rows, then the results. A compiler captures torch's functional all-to-all; without one, the
rows travel by `shared.comms.start_exchange`, whose errors name the rank that died.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed._functional_collectives import all_to_all_single

from shared.comms import Group, start_exchange

__all__ = ["ExpertRows", "TokenDispatch", "mark_end", "mark_start"]


@dataclass(frozen=True, slots=True)
class ExpertRows:
    """The rows that a rank's experts received.

    Attributes:
        values: rows received [num_received, hidden], those of rank 0 first, each rank's by expert.
        expert_ids: number of each row's expert among this rank's [num_received].
        order: for each row sent, its (token, choice) pair [num_tokens * k]; by expert.
        inverse: for each (token, choice) pair, its row among those sent.
        send_sizes: rows sent to each rank.
        recv_sizes: rows received from each rank.
    """

    values: Tensor
    expert_ids: Tensor
    order: Tensor
    inverse: Tensor
    send_sizes: list[int]
    recv_sizes: list[int]


class TokenDispatch:
    """Exchanges the tokens of one layer of experts, an equal number of which lie on each rank.

    Args:
        group: ranks over which the experts are divided; rank r has the r-th part of them.
        num_local_experts: experts of a rank.
        name: the layer's name, for errors and the ledger.
    """

    def __init__(self, group: Group, num_local_experts: int, name: str) -> None:
        self._group, self._num_local, self._name = group, num_local_experts, name

    def __deepcopy__(self, _memo: Any) -> TokenDispatch:
        """The same: copies of a model share its ranks."""
        return self

    def send(self, hidden: Tensor, expert_ids: Tensor) -> ExpertRows:
        """Sends each token [num_tokens, hidden] to the ranks of its experts [num_tokens, k].

        Raises:
            CommError: a rank died or the timeout passed; names rank and layer.
        """
        size, flat = self._group.world_size, expert_ids.reshape(-1)
        order = torch.argsort(flat, stable=True)
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(len(order), device=order.device)
        counts = torch.zeros(size * self._num_local, dtype=torch.long, device=flat.device)
        counts = counts.scatter_add(0, flat, torch.ones_like(flat))
        equal = [self._num_local] * size
        received = self._exchange(counts, equal, equal, "numbers of rows")
        totals = torch.stack([counts.view(size, -1).sum(1), received.view(size, -1).sum(1)])
        send_sizes, recv_sizes = totals.tolist()
        # The compiler learns these numbers only as the graph runs.
        for num_rows in (*send_sizes, *recv_sizes):
            torch._check(num_rows >= 0)
        torch._check(sum(send_sizes) == len(order))
        rows = _Permute.apply(hidden, order, inverse, expert_ids.shape[1])
        values = self._exchange(rows, send_sizes, recv_sizes, "tokens")
        local_ids = torch.arange(self._num_local, device=flat.device).repeat(size)
        local_ids = local_ids.repeat_interleave(received, output_size=sum(recv_sizes))
        return ExpertRows(values, local_ids, order, inverse, send_sizes, recv_sizes)

    def bring_back(self, results: Tensor, rows: ExpertRows, weights: Tensor) -> Tensor:
        """Returns results [num_received, hidden] to their tokens, weighted [num_tokens, k] and summed.

        Raises:
            CommError: a rank died or the timeout passed; names rank and layer.
        """
        sent = self._exchange(results, rows.recv_sizes, rows.send_sizes, "results")
        choices = _Permute.apply(sent, rows.inverse, rows.order, 1)
        return (choices.view(*weights.shape, results.shape[-1]) * weights.unsqueeze(-1)).sum(1)

    def _exchange(self, rows: Tensor, sends: list[int], recvs: list[int], what: str) -> Tensor:
        if torch.compiler.is_compiling():
            return all_to_all_single(rows, recvs, sends, self._group.checked())
        return _Exchange.apply(rows, sends, recvs, self._group, f"{what} of {self._name}")


def mark_start(
    hidden: Tensor, expert_ids: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns its arguments: tells a planner that tokens leave the order of the batch here."""
    return hidden.view_as(hidden), expert_ids.view_as(expert_ids), weights.view_as(weights)


def mark_end(results: Tensor) -> Tensor:
    """Returns its argument: tells a planner that rows are in the order of the batch again."""
    return results.view_as(results)


# A node each of the graph that is traced; nothing of them is left after it is captured.
torch.compiler.allow_in_graph(mark_start)
torch.compiler.allow_in_graph(mark_end)


class _Permute(torch.autograd.Function):
    """Row i of the result is row `order[i] // repeats`, where `order` is a permutation.

    Its gradient is a sum in one order, which that of indexing is not when several threads add.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, inverse: Tensor, repeats: int) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.repeats = repeats
        return rows[order if repeats == 1 else order // repeats]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        (inverse,) = ctx.saved_tensors
        rows = gradients[0][inverse]
        if ctx.repeats > 1:
            rows = rows.view(-1, ctx.repeats, rows.shape[-1]).sum(1)
        return rows, None, None, None


class _Exchange(torch.autograd.Function):
    """An all-to-all whose gradient travels back the same way."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, sends: list[int], recvs: list[int], group: Group, phase: str
    ) -> Tensor:
        ctx.arguments = recvs, sends, group, f"gradients of the {phase}"
        return start_exchange(group, rows.contiguous(), sends, recvs, phase=phase).wait()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None]:
        recvs, sends, group, phase = ctx.arguments
        rows = gradients[0].contiguous()
        back = start_exchange(group, rows, recvs, sends, phase=phase).wait()
        return back, None, None, None, None
