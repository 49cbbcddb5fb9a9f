"""Reads the memory snapshots of PyTorch's CUDA allocator, without trusting the file."""

from __future__ import annotations

import io
import pickle
from bisect import bisect_left, insort
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from shared.errors import DataError

__all__ = ["read_events"]

_ALLOC = "alloc"
# A block is free for others when its free is completed; older versions write "free" alone.
_FREES = ("free_completed", "free")
# Written by the allocator beside what its users ask for: segments, requests, pressure, snapshots.
_IGNORED = (
    "free_requested", "segment_alloc", "segment_free", "segment_map", "segment_unmap", "snapshot", "oom",
    "user_defined", "workspace_snapshot",
)  # fmt: skip

# Of these, what gives memory back to the device.
_GIVEN_BACK = ("segment_free", "segment_unmap")


class _DataUnpickler(pickle.Unpickler):
    """Knows containers, numbers and texts, which pickle makes without importing anything."""

    def find_class(self, module: str, name: str) -> Any:
        raise DataError(
            f"expected a snapshot of containers, numbers and texts, got one that imports "
            f"{module}.{name}; it was not run: dump it again with torch.cuda.memory._dump_snapshot"
        )

    def persistent_load(self, pid: Any) -> Any:
        raise DataError(f"expected a snapshot that holds all of its data, got a reference {pid!r}")


def read_events(path: Path, device: int | None) -> tuple[list[tuple], dict[str, int]]:
    """Events of a snapshot, and counts of what was left out.

    Raises:
        DataError: see `Trace.from_cuda_snapshot`.
    """
    history = _choose_device(path, _load(path), device)
    blocks = _Blocks()
    events: list[tuple] = []
    dropped = {"frees of what was allocated before": 0, "entries of other kinds": 0}
    for index, entry in enumerate(history):
        action = _read_action(path, index, entry)
        where = f"{path}, entry {index}"
        if action == _ALLOC:
            address, size = _read_block(where, entry)
            blocks.allocate(where, index, address, size)
            events.append((_ALLOC, address, size))
        elif action in _FREES:
            address, size = _read_block(where, entry)
            if blocks.free(where, index, address, size):
                events.append(("free", address))
            else:
                dropped["frees of what was allocated before"] += 1
        elif action in _IGNORED:
            if action in _GIVEN_BACK:
                blocks.check_free(where, *_read_block(where, entry))
            dropped["entries of other kinds"] += 1
        else:
            raise DataError(f"{where}: expected an action of the caching allocator, got {action!r}")
    if not any(event[0] == _ALLOC for event in events):
        raise DataError(
            f"{path}: expected allocations in the history, got none; call "
            "torch.cuda.memory._record_memory_history() before the step"
        )
    return events, {reason: count for reason, count in dropped.items() if count}


class _Blocks:
    """Blocks that a history allocates and frees; they never overlap, and each is freed once."""

    def __init__(self) -> None:
        self._alive: dict[int, tuple[int, int]] = {}
        """Size and entry of each live block by its address."""
        self._addresses: list[int] = []
        self._freed: dict[int, int] = {}
        """Entry that freed each address which was not allocated again since."""

    def allocate(self, where: str, index: int, address: int, size: int) -> None:
        """Begins a block.

        Raises:
            DataError: it overlaps a live one.
        """
        if address in self._alive:
            raise DataError(
                f"{where}: address {address:#x} is allocated while it is alive: a free is missing; "
                "record with a larger max_entries"
            )
        self._check_apart(where, address, size, "allocated")
        self._alive[address] = size, index
        insort(self._addresses, address)
        self._freed.pop(address, None)

    def free(self, where: str, index: int, address: int, size: int) -> bool:
        """Ends a block; returns whether the history allocated it.

        Raises:
            DataError: it was freed before, has another size, or overlaps a live block.
        """
        if address in self._freed:
            raise DataError(
                f"{where}: address {address:#x} is freed, but entry {self._freed[address]} freed it before; expected "
                "one free of each block, dump the snapshot again"
            )
        self._freed[address] = index
        if address not in self._alive:
            self._check_apart(where, address, size, "freed")
            return False
        allocated, since = self._alive.pop(address)
        del self._addresses[bisect_left(self._addresses, address)]
        if size != allocated:
            raise DataError(
                f"{where}: expected {allocated:,} bytes to be freed at address {address:#x}, as entry {since} "
                f"allocated, got {size:,}; dump the snapshot again"
            )
        return True

    def check_free(self, where: str, address: int, size: int) -> None:
        """Refuses memory that goes back to the device while a block in it is alive.

        Raises:
            DataError: one is.
        """
        self._check_apart(where, address, size, "given back to the device")

    def _check_apart(self, where: str, address: int, size: int, what: str) -> None:
        end = address + size
        number = bisect_left(self._addresses, end)
        if number == 0:
            return
        start = self._addresses[number - 1]
        length, since = self._alive[start]
        if start + length > address and size > 0:
            raise DataError(
                f"{where}: {size:,} bytes at address {address:#x} are {what}, but they overlap the {length:,} bytes at "
                f"{start:#x} that entry {since} allocated and nothing freed; record with a larger max_entries"
            )


def _load(path: Path) -> list[list[Any]]:
    data = path.read_bytes()
    try:
        loaded = _DataUnpickler(io.BytesIO(data)).load()
    except DataError as error:
        raise DataError(f"{path}: {error}") from error
    # Of a torn or foreign file pickle raises whatever its opcodes lead to.
    except Exception as error:
        raise DataError(f"{path}: expected a pickled snapshot, got {error!r}") from error
    traces = loaded.get("device_traces") if isinstance(loaded, dict) else None
    if not isinstance(traces, list) or not all(isinstance(one, list) for one in traces):
        raise DataError(
            f"{path}: expected a snapshot with 'device_traces', got {type(loaded).__name__}; write it "
            "with torch.cuda.memory._dump_snapshot"
        )
    return traces


def _choose_device(path: Path, traces: list[list[Any]], device: int | None) -> list[Any]:
    used = [number for number, history in enumerate(traces) if history]
    if device is None:
        if len(used) != 1:
            raise DataError(
                f"{path}: expected the history of one device, got that of {_listed(used)}; name one "
                "with device="
            )
        device = used[0]
    if device not in used:
        raise DataError(f"{path}: expected a device with a history, {_listed(used)}, got {device}")
    return traces[device]


def _listed(devices: Iterable[int]) -> str:
    return "devices " + ", ".join(map(str, devices)) if devices else "none"


def _read_action(path: Path, index: int, entry: Any) -> Any:
    try:
        return entry["action"]
    except (TypeError, KeyError) as error:
        raise DataError(f"{path}, entry {index}: expected an action, got {entry!r}") from error


def _read_block(where: str, entry: Any) -> tuple[int, int]:
    """An entry's address and size."""
    numbers = entry.get("addr"), entry.get("size")
    if not all(isinstance(one, int) and not isinstance(one, bool) and one >= 0 for one in numbers):
        raise DataError(f"{where}: expected an address and a size, from 0 on, got {entry!r}")
    return numbers
