"""How fast items go to a store and come back while layers compute beside them."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch

from memo.runtime.moving.buffers import Buffers
from memo.runtime.stores.base import Store
from shared.topology.link import Link, fit_link

__all__ = ["StoreRate", "measure_store"]

_SIZES = (1 << 20, 4 << 20, 16 << 20)


@dataclass(frozen=True, slots=True)
class StoreRate:
    """The way to a store and back.

    Attributes:
        send, fetch: seconds of a copy by its bytes, while `work` runs.
        slowdown: factor by which `work` takes longer beside copies, at least 1.
        own_bytes: of RAM that the store takes itself.
    """

    send: Link
    fetch: Link
    slowdown: float
    own_bytes: int


def measure_store(
    store: Store, work: Callable[[], None], *, repeats: int = 3, limit_bytes: int | None = None
) -> StoreRate:
    """Copies buffers out and back in a thread while work is repeated in this one.

    Args:
        store: open and empty.
        work: what copies are to hide behind, a layer's forward.
        repeats: copies of each size and way.
        limit_bytes: of the store; sizes above it are left out.

    Raises:
        DataError: the disk is full, or fails.
    """
    sizes = [one for one in _SIZES if limit_bytes is None or one <= limit_bytes] or [4096]
    work()
    started = time.perf_counter()
    for _ in range(2):
        work()
    alone_s = (time.perf_counter() - started) / 2
    sent: list[tuple[int, float]] = []
    fetched: list[tuple[int, float]] = []
    beside_s = []
    with ThreadPoolExecutor(1, "memo-rate") as thread:
        memory = Buffers(1, torch.device("cpu")).take(max(sizes)).memory.numpy()
        memory[:] = np.arange(len(memory), dtype=np.uint8)
        slot = store.allocate(max(sizes))

        def copy() -> None:
            for _ in range(repeats):
                for size in sizes:
                    sent.append((size, _timed(store.write, slot.offset, memory[:size])))
                    fetched.append((size, _timed(store.read, slot.offset, memory[:size])))

        copies = thread.submit(copy)
        while not copies.done():
            started = time.perf_counter()
            work()
            if not copies.done():  # only while copies ran beside it throughout
                beside_s.append(time.perf_counter() - started)
        copies.result()
    slowdown = max(1.0, sum(beside_s) / len(beside_s) / alone_s) if beside_s else 1.0
    return StoreRate(_fit(sent), _fit(fetched), slowdown, store.own_bytes)


def _timed(call: Callable[[int, np.ndarray], None], offset: int, data: np.ndarray) -> float:
    started = time.perf_counter()
    call(offset, data)
    return time.perf_counter() - started


def _fit(samples: list[tuple[int, float]]) -> Link:
    """A link by the median of each size."""
    sizes = sorted({size for size, _ in samples})
    medians = [(size, float(np.median([s for one, s in samples if one == size]))) for size in sizes]
    if len(medians) == 1:
        return Link.from_rate(medians[0][0] / max(medians[0][1], 1e-9))
    return fit_link(medians, is_quiet=True).link
