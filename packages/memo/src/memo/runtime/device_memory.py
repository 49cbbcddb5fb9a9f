"""Bytes that this process holds on a device, now and at most."""

from __future__ import annotations

import ctypes
import os

import torch

__all__ = ["data_bytes", "give_back_at_once", "hole_bytes", "peak_bytes", "resident_bytes"]

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # names of mallopt's parameters
_OWN_PAGES_BYTES = 256 * 1024


def resident_bytes(device: torch.device) -> int:
    """Bytes that this process holds on a device now: resident pages of RAM, or blocks of tensors on a GPU.

    What a GPU's allocator has reserved beyond blocks in use serves the next tensors, and is not counted.
    """
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def give_back_at_once() -> None:
    """Has glibc return what is freed to the system, so that bytes held are bytes in use; it stays so.

    Of itself it comes to keep blocks of up to 32 MiB in its heap, where later ones leave gaps between them: a process
    may then hold twice what its tensors take. Other allocators are left as they are.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, _OWN_PAGES_BYTES)
        mallopt(_TRIM_THRESHOLD, _OWN_PAGES_BYTES)


def hole_bytes() -> int:
    """Bytes of RAM that allocations may still fill without anything being given back for them.

    What was freed inside of the heap and went back to the system (by `malloc_trim`) becomes resident again as
    allocations too small for pages of their own come to lie there. 0 where the system does not say.
    """
    is_heap, found = False, {"Size:": 0, "Rss:": 0}
    try:
        with open("/proc/self/smaps", encoding="ascii", errors="replace") as file:
            for line in file:
                name, *rest = line.split()
                if not name.endswith(":"):
                    is_heap = rest[-1:] == ["[heap]"]
                elif is_heap and name in found:
                    found[name] += int(rest[0]) * 1024
    except OSError:
        return 0
    return found["Size:"] - found["Rss:"]


def peak_bytes(device: torch.device) -> int | None:
    """Most bytes that it held on it so far; None where the system does not say."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return _status_bytes("VmHWM")


def data_bytes() -> int | None:
    """Bytes that RLIMIT_DATA limits, mapped ones that are not resident among them; None where nothing says."""
    return _status_bytes("VmData")


def _status_bytes(name: str) -> int | None:
    with open("/proc/self/status", encoding="ascii") as file:
        for line in file:
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
    return None
