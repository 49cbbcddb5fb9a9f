"""Decoding passes as CUDA graphs, so that each is one launch.

A pass is captured for each power of two of places, and for all places; idle places pad a pass to
the next such count. A pass reads and writes memory at fixed addresses during one generation, and a
graph lives no longer, so none is stale: between generations weights may change and move, and the
cache's memory is free for training. The cost is new captures in each generation; counts of places
that occur only a few times are not captured.

NCCL collectives are captured too. When replayed, they are not recorded in the ledger, and torch
does not watch them for timeouts. Graphs are untested on a GPU: the tests record a pass on the CPU
as its sequence of operations, and check that repeating these gives the same results.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from hybridflow.models.decoder import Shard

__all__ = ["Replayed", "can_capture", "capture"]

# About as many passes as a capture costs; an estimate, not measured. At least one, because the
# first pass compiles kernels and connects ranks, which a capture must not do.
NUM_UNCAPTURED = 4


def can_capture(device: torch.device, shard: Shard) -> bool:
    """Whether a pass through a model on a device consists of kernels only.

    The host takes part in messages between pipeline stages and in gloo's collectives.
    """
    is_kernels = shard.group is None or shard.group.backend == "nccl"
    return device.type == "cuda" and shard.num_stages == 1 and is_kernels


def capture(run: Callable[[], None], pool: Any = None) -> torch.cuda.CUDAGraph:
    """Captures the kernels that `run` launches without executing them; `replay` executes them.

    `pool` is another graph's memory pool, used for temporaries: graphs that share it must not run
    at once, and must leave no results there.
    """
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    # Not `torch.cuda.graph`, which empties the allocator's cache each time, and after a failure
    # leaves its own stream current.
    with torch.cuda.stream(torch.cuda.Stream()):
        # Other threads may use the device meanwhile.
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            run()
        finally:
            graph.capture_end()
    return graph


class Replayed:
    """A pass, captured once for each number of places to which it is padded."""

    def __init__(self, run: Callable[[int], None], num_places: int) -> None:
        """Captures nothing yet.

        Args:
            run: the pass over the first `count` places; the host must do the same in every call
                with the same count.
            num_places: largest count.
        """
        self._run, self._num_places = run, num_places
        self._num_plain: Counter[int] = Counter()
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._may_capture = True

    def __call__(self, num_used: int) -> None:
        """Runs a pass over the first `num_used` places, those in use."""
        count = min(self._num_places, 1 << (num_used - 1).bit_length())
        if count not in self._graphs:
            if self._num_plain[count] < NUM_UNCAPTURED or not self._may_capture:
                self._num_plain[count] += 1
                self._run(count)
                return
            pool = next((graph.pool() for graph in self._graphs.values()), None)
            try:
                self._graphs[count] = capture(partial(self._run, count), pool)
            except RuntimeError as error:
                warnings.warn(
                    f"no CUDA graph of decoding could be captured, so that it is slower: {error}",
                    RuntimeWarning,
                    stacklevel=2,
                )
                self._may_capture = False
                self._run(count)
                return
        self._graphs[count].replay()
