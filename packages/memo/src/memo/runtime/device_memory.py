"""Bytes that this process holds on a device, now and at most."""

from __future__ import annotations

import os

import torch

__all__ = ["peak_bytes", "resident_bytes"]


def resident_bytes(device: torch.device) -> int:
    """Bytes that this process holds on a device now: resident pages of RAM, or what a GPU has reserved."""
    if device.type == "cuda":
        return torch.cuda.memory_reserved(device)
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def peak_bytes(device: torch.device) -> int | None:
    """Most bytes that it held on it so far; None where the system does not say."""
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device)
    with open("/proc/self/status", encoding="ascii") as file:
        for line in file:
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return None
