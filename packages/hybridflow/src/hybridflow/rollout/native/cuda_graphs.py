"""Passes over the newest tokens as CUDA graphs, so that each is one launch.

A pass is captured for numbers of places that are powers of two, and for the largest; idle places fill
up the rest. It reads and writes memory that stays where it is during a generation, and a graph does
not outlive that, so none can be stale: between two of them weights may change and move, and the
cache's memory is free for training. The price is captures in each generation; numbers of places that
come a few times only are not captured.

Collectives over NCCL are captured with the rest. Replayed, they are not written to the ledger, and
torch does not watch them for timeouts. Nothing of this has run on a GPU yet: what is tested is that a
pass, recorded on the CPU as the operations that it is made of, gives the same when they are repeated.
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

# As many passes as a capture may cost; a guess, no device was at hand. One at least: it compiles
# kernels and connects ranks, which a capture must not.
NUM_UNCAPTURED = 4


def can_capture(device: torch.device, shard: Shard) -> bool:
    """Whether a pass through a model, on its device, is nothing but kernels one after another.

    The host takes part in what the stages of a pipeline exchange, and in what gloo does.
    """
    is_kernels = shard.group is None or shard.group.backend == "nccl"
    return device.type == "cuda" and shard.num_stages == 1 and is_kernels


def capture(run: Callable[[], None], pool: Any = None) -> torch.cuda.CUDAGraph:
    """Records what `run` launches, without doing it; the graph's `replay` does it.

    `pool` is that of another graph, for what is made on the way: graphs that share it must not run at
    once, and must leave nothing there.
    """
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    # Not `torch.cuda.graph`, which gives cached memory back to the device each time, and after a
    # failure leaves its stream the current one.
    with torch.cuda.stream(torch.cuda.Stream()):
        # Other threads may be busy with the device.
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            run()
        finally:
            graph.capture_end()
    return graph


class Replayed:
    """A pass, captured once for each number of places that it is filled up to."""

    def __init__(self, run: Callable[[int], None], num_places: int) -> None:
        """Captures nothing yet.

        Args:
            run: the pass over so many of the first places; nothing that the host does in it must
                differ between two calls with the same number.
            num_places: the most there are.
        """
        self._run, self._num_places = run, num_places
        self._num_plain: Counter[int] = Counter()
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._may_capture = True

    def __call__(self, num_used: int) -> None:
        """A pass over the places in use, the first ones."""
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
