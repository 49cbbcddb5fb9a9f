"""Process marks in names, so that leftovers of killed processes can be removed.

A mark consists of the process id and the process's start time in ticks, since ids are reused.
"""

import os
from pathlib import Path

__all__ = ["is_alive", "mark"]


def mark() -> str:
    """This process's mark, to be used in names: "1234-567890"."""
    return f"{os.getpid()}-{_start_ticks(os.getpid())}"


def is_alive(name: str) -> bool:
    """Whether the process whose mark `name` starts with is running; true without /proc."""
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
