"""How many of this process's cores other programs leave free.

A demo that starts as many threads as there are cores, beside another busy program, has threads that
wait for one that is not running at every parallel loop: it becomes many times slower, not twice.
"""

import os
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

__all__ = ["STAT", "count_free_cores", "idle_shares"]

STAT = Path("/proc/stat")
"""The kernel's file of the ticks that each core spent in each kind of work."""
# Idle share of a core below 1 that still counts, as this process itself and the kernel take some.
_TAKEN = 0.35


def count_free_cores(look_s: float = 0.25) -> int:
    """Counts the cores that are free; at least one.

    Args:
        look_s: seconds over which cores are observed.

    Returns:
        Number of cores that this process may use and that were idle meanwhile; all that it may use if
        the kernel does not tell (`/proc/stat`).
    """
    cores = os.sched_getaffinity(0)
    with suppress(OSError):
        before = STAT.read_text()
        time.sleep(look_s)
        shares = idle_shares(before, STAT.read_text(), cores)
        if shares:
            return max(1, int(sum(shares) + _TAKEN))
    return len(cores)


def idle_shares(before: str, after: str, cores: Iterable[int]) -> list[float]:
    """Computes the share of time that each core was idle between two readings of /proc/stat.

    Args:
        before, after: the file's text.
        cores: numbers of the cores that count; those that the file lacks are left out.
    """
    first, second = _read_times(before), _read_times(after)
    shares = []
    for core in cores:
        if core in first and core in second:
            spent = [new - old for old, new in zip(first[core], second[core], strict=False)]
            idle = sum(spent[3:5])  # idle, and waiting for a disk
            shares.append(idle / sum(spent) if sum(spent) > 0 else 1.0)
    return shares


def _read_times(text: str) -> dict[int, list[int]]:
    """Ticks of each core by kind: user, nice, system, idle, iowait, irq, softirq, steal."""
    lines = (line.split() for line in text.splitlines())
    return {
        int(words[0][3:]): [int(word) for word in words[1:9]]
        for words in lines
        if words and words[0].startswith("cpu") and words[0] != "cpu"
    }
