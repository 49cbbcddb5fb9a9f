"""This process's share of its host's memory, within which a budget is kept.

A container may have far less than the machine: what its control group allows is read, not only what the
machine has. Processes of one host share it evenly.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch

from memo.config import Budget
from memo.runtime.device_memory import resident_bytes
from shared.units import format_bytes

__all__ = ["host_share_bytes", "keep_within_host"]

_log = logging.getLogger(__name__)


def keep_within_host(budget: Budget, device: torch.device, store: str) -> Budget:
    """Lowers limits of RAM to this process's share of its host; says so where that changes one.

    Args:
        budget: of this process.
        device: the model's; it takes RAM where it is the CPU.
        store: where activations wait; "memory" and "pinned" take RAM, a file does not.
    """
    share = host_share_bytes()
    is_ram = device.type == "cpu"
    in_ram = min(budget.device_bytes, share) if is_ram else resident_bytes(torch.device("cpu"))
    kept = {
        "device": min(budget.device_bytes, share) if is_ram else budget.device_bytes,
        "store": budget.store_bytes
        if store.startswith("file:")
        else min(budget.store_bytes, max(share - in_ram, 0)),
    }
    for name, limit in kept.items():
        if limit < getattr(budget, f"{name}_bytes"):
            _log.warning(
                "budget.%s: expected at most %s, this process's share of its host's memory, got %s; planning "
                "for less",
                name, format_bytes(limit), format_bytes(getattr(budget, f"{name}_bytes")),
            )  # fmt: skip
    return replace(budget, **kept)


def host_share_bytes(root: Path = Path("/")) -> int:
    """Most bytes of RAM for this process: the machine's or its control group's, by torchrun's local ranks.

    Args:
        root: of the file system in which `proc` and `sys` are.
    """
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    num_local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return min([machine, *_group_limits(root)]) // max(num_local, 1)


def _group_limits(root: Path) -> Iterator[int]:
    """Limits of the process's control group and of all groups around it, of either version."""
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="ascii").splitlines()
    except OSError:  # a system without control groups
        return
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number == "0":
            top, name = root / "sys/fs/cgroup", "memory.max"
        elif "memory" in controllers.split(","):
            top, name = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes"
        else:
            continue
        own = Path(path.lstrip("/"))
        # In a container the own group is the top, whatever its path outside.
        for group in (own, *own.parents):
            try:
                limit = (top / group / name).read_text(encoding="ascii").strip()
            except OSError:
                continue
            if limit.isdigit():  # else "max"
                yield int(limit)
