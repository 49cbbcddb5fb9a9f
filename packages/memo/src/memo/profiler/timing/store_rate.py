"""How fast items go to a store and come back while layers compute beside them."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import ceil
from typing import Any

import numpy as np
import torch

from memo.runtime.moving.buffers import Buffers
from memo.runtime.moving.streams import CudaStreams, Streams
from memo.runtime.stores.base import Store
from memo.runtime.stores.memory import MemoryStore
from shared.topology.link import Link, fit_link

__all__ = ["StoreRate", "measure_store", "measure_streams"]

_SIZES = (1 << 20, 4 << 20, 16 << 20)
_STREAM_SIZES = (4 << 20, 16 << 20, 64 << 20)
_RAM = torch.device("cpu")


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
    store: Store,
    work: Callable[[], None],
    *,
    device: torch.device = _RAM,
    repeats: int = 3,
    limit_bytes: int | None = None,
) -> StoreRate:
    """Copies buffers out and back while work is repeated: in a thread, or by streams of a GPU.

    Args:
        store: open and empty.
        work: what copies are to hide behind, a layer's forward.
        device: of the buffers.
        repeats: copies of each size and way.
        limit_bytes: of the store; sizes above it are left out.

    Raises:
        DataError: the disk is full, or fails.
    """
    if device.type == "cuda":
        assert isinstance(store, MemoryStore)
        streams = CudaStreams(device)
        memory = torch.empty(
            max(_within(_STREAM_SIZES, limit_bytes)), dtype=torch.uint8, device=device
        )
        return measure_streams(
            store, work, streams, memory, repeats=repeats, limit_bytes=limit_bytes
        )
    sizes = _within(_SIZES, limit_bytes)
    work()
    alone_s = min(_seconds(work) for _ in range(2))
    sent: list[tuple[int, float]] = []
    fetched: list[tuple[int, float]] = []
    beside_s = []
    with ThreadPoolExecutor(1, "memo-rate") as thread:
        memory = Buffers(1, _RAM).take(max(sizes)).memory.numpy()
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
    slowdown = max(1.0, float(np.median(beside_s)) / alone_s) if beside_s else 1.0
    return StoreRate(_fit(sent), _fit(fetched), slowdown, store.own_bytes)


def measure_streams(
    store: MemoryStore,
    work: Callable[[], None],
    streams: Streams,
    memory: torch.Tensor,
    *,
    repeats: int = 3,
    limit_bytes: int | None = None,
) -> StoreRate:
    """Copies a device's memory out and back in streams of copies while work is repeated in the compute stream.

    Args:
        store, work, repeats, limit_bytes: see `measure_store`.
        streams: of the device.
        memory: uint8, on the device, as long as the longest copy.
    """
    sizes = _within(_STREAM_SIZES, limit_bytes)
    pieces = store.pieces(store.allocate(len(memory)).offset, len(memory))

    def copy(size: int) -> list[tuple[str, int, Any, Any]]:
        """Copies out and back, one after the other; which way, bytes, and events of begin and end."""
        found = []
        for queue, after in (("out", "back"), ("back", "out")):
            streams.wait(queue, streams.record(after))
            begin, at = streams.record(queue), 0
            for host in map(torch.from_numpy, pieces):
                host = host[: max(size - at, 0)]
                near = memory[at : at + len(host)]
                streams.copy(queue, *((host, near) if queue == "out" else (near, host)))
                at += len(host)
            found.append((queue, size, begin, streams.record(queue)))
        return found

    def clocked(call: Callable[[], object]) -> float:
        streams.synchronize()
        started = time.perf_counter()
        call()
        streams.synchronize()
        return time.perf_counter() - started

    alone_s = min(clocked(work) for _ in range(3))
    round_s = min(clocked(lambda: [copy(size) for size in sizes]) for _ in range(2))
    # A GPU's copies are over soon: they go on beside two of the work, which may take twice as long.
    rounds = max(repeats, ceil(4 * alone_s / round_s)) if round_s > 0 else repeats
    copies = [one for _ in range(rounds) for size in sizes for one in copy(size)]
    works = []
    for _ in range(2):
        begin = streams.record("compute")
        work()
        works.append((begin, streams.record("compute")))
    streams.synchronize()
    beside_s = [streams.seconds(*one) or 0.0 for one in works]
    spent = {
        way: [
            (size, streams.seconds(*ends) or 0.0) for queue, size, *ends in copies if queue == way
        ]
        for way in ("out", "back")
    }
    slowdown = max(1.0, float(np.mean(beside_s)) / alone_s) if alone_s > 0 else 1.0
    return StoreRate(_fit(spent["out"]), _fit(spent["back"]), slowdown, store.own_bytes)


def _within(sizes: tuple[int, ...], limit_bytes: int | None) -> list[int]:
    return [one for one in sizes if limit_bytes is None or one <= limit_bytes] or [4096]


def _timed(call: Callable[[int, np.ndarray], None], offset: int, data: np.ndarray) -> float:
    started = time.perf_counter()
    call(offset, data)
    return time.perf_counter() - started


def _seconds(work: Callable[[], None]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def _fit(samples: list[tuple[int, float]]) -> Link:
    """A link by the lower quartile of each size, which other programs disturb less than the median."""
    sizes = sorted({size for size, _ in samples})
    by_size = {size: [spent_s for one, spent_s in samples if one == size] for size in sizes}
    typical = [(size, float(np.quantile(spent_s, 0.25))) for size, spent_s in by_size.items()]
    if len(typical) == 1:
        return Link.from_rate(typical[0][0] / max(typical[0][1], 1e-9))
    return fit_link(typical, is_quiet=True).link
