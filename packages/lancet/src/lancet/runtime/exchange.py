"""Starts and waits for a graph's collectives over `shared.comms`, and measures each wait."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from lancet.graph.rewrite import collectives
from lancet.runtime.reduction import PendingSum
from shared.comms import Group, start_exchange

__all__ = ["Communication"]

# Sums of one element by which the latency of a sum is measured.
_NUM_SMALL_SUMS = 9


class Communication:
    """The collectives of one graph.

    Args:
        group: ranks that run the graph.
        name: the graph's, for the ledger and for errors.

    Attributes:
        waited_s: for each collective, by its node's name, the seconds of the last run in which the
            graph waited for it.
    """

    def __init__(self, group: Group, name: str) -> None:
        self._group, self._name = group, name
        self.waited_s: dict[str, float] = {}

    def insert(self, graph: fx.Graph) -> None:
        """Puts this object's starts and waits in place of the graph's collectives and waits."""
        name = self._group.checked().group_name
        for start, kind in collectives(graph, name).items():
            (wait,) = start.users
            if kind == "all_to_all":
                rows, recv_sizes, send_sizes, _ = start.args
                start.target = self.start_all_to_all
                start.args = rows, recv_sizes, send_sizes, start.name
            else:
                name_of_group = start.meta.get("fused")
                start.target = self.start_all_reduce
                start.args = start.args[0], name_of_group or start.name, bool(name_of_group)
            wait.target = self.wait

    def start_all_to_all(
        self, rows: Tensor, recv_sizes: Sequence[int], send_sizes: Sequence[int], name: str
    ) -> tuple[str, Any]:
        """Starts an exchange of rows; returns what `wait` takes."""
        phase = f"{self._name}: {name}"
        rows = rows.contiguous()
        return name, start_exchange(self._group, rows, send_sizes, recv_sizes, phase=phase)

    def start_all_reduce(self, tensor: Tensor, name: str, is_buffer: bool) -> tuple[str, Any]:
        """Starts a sum over the ranks, in place if it is of a buffer; returns what `wait` takes."""
        if not is_buffer:
            tensor = tensor.clone(memory_format=torch.contiguous_format)
        return name, PendingSum(self._group, tensor, f"{self._name}: {name}")

    def time_small_sum(self) -> float:
        """Seconds of a sum of one element over the ranks, the least of some; all ranks call it."""
        seconds = []
        for _ in range(_NUM_SMALL_SUMS):
            start_s = time.perf_counter()
            element = torch.zeros(1, device=self._group.device)
            PendingSum(self._group, element, f"{self._name}: latency").wait()
            seconds.append(time.perf_counter() - start_s)
        return min(seconds)

    def wait(self, pending: tuple[str, Any]) -> Tensor:
        """Waits for a collective and returns its result.

        Raises:
            CommError: a rank died or the timeout passed; names rank and node.
        """
        name, handle = pending
        start_s = time.perf_counter()
        result = handle.wait()
        self.waited_s[name] = time.perf_counter() - start_s
        return result
