"""Reads the memory snapshots of PyTorch's CUDA allocator, without trusting the file."""

from __future__ import annotations

import io
import pickle
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
    events: list[tuple] = []
    alive: set[int] = set()
    dropped = {"frees of what was allocated before": 0, "entries of other kinds": 0}
    for index, entry in enumerate(history):
        action, address, size = _read_entry(path, index, entry)
        if action == _ALLOC:
            if address in alive:
                raise DataError(
                    f"{path}, entry {index}: address {address:#x} is allocated while it is alive: a "
                    "free is missing; record with a larger max_entries"
                )
            alive.add(address)
            events.append((_ALLOC, address, size))
        elif action in _FREES:
            if address in alive:
                alive.remove(address)
                events.append(("free", address))
            else:
                dropped["frees of what was allocated before"] += 1
        elif action in _IGNORED:
            dropped["entries of other kinds"] += 1
        else:
            raise DataError(
                f"{path}, entry {index}: expected an action of the caching allocator, got {action!r}"
            )
    if not any(event[0] == _ALLOC for event in events):
        raise DataError(
            f"{path}: expected allocations in the history, got none; call "
            "torch.cuda.memory._record_memory_history() before the step"
        )
    return events, {reason: count for reason, count in dropped.items() if count}


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


def _read_entry(path: Path, index: int, entry: Any) -> tuple[str, int, int]:
    try:
        action, address, size = entry["action"], entry.get("addr", 0), entry.get("size", 0)
    except (TypeError, KeyError, AttributeError) as error:
        raise DataError(f"{path}, entry {index}: expected an action, got {entry!r}") from error
    if not (isinstance(address, int) and isinstance(size, int) and size >= 0):
        raise DataError(f"{path}, entry {index}: expected an address and a size, got {entry!r}")
    return action, address, size
