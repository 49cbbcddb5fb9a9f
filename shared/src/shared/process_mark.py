"""Names that tell which process made a thing, so that what a killed one left can be removed.

A process is named by its number and the tick it started at, since numbers are used again.
"""

import os
from pathlib import Path

__all__ = ["is_alive", "mark"]


def mark() -> str:
    """This process, as a part of a name: "1234-567890"."""
    return f"{os.getpid()}-{_start_ticks(os.getpid())}"


def is_alive(name: str) -> bool:
    """Whether the process is running whose mark comes first in `name`; yes where nobody knows."""
    if not Path("/proc/self/stat").exists():
        return True
    pid, ticks, *_ = [*name.split("-"), "", ""]
    return pid.isdigit() and _start_ticks(int(pid)) == ticks


def _start_ticks(pid: int) -> str:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    # The command's name, the second field, may hold spaces and parentheses.
    return stat.rpartition(")")[2].split()[19]
