"""On what a benchmark ran: the machine, versions of what it used, the commit."""

import os
import platform
import re
import subprocess
from importlib import metadata
from pathlib import Path

from definition import Definition

__all__ = ["commit", "describe_machine", "processor", "versions"]

ALWAYS = ("torch", "numpy", "numba", "triton")
_NO_PEERS = {"pytest", "shared"}


def processor() -> str:
    """Returns the CPU's model name."""
    info = Path("/proc/cpuinfo")
    if info.is_file():
        match = re.search(r"model name\s*:\s*(.+)", info.read_text(encoding="utf-8"))
        if match:
            return match[1].strip()
    return platform.processor() or platform.machine()


def describe_machine() -> str:
    """Returns the CPU model, the cores and the memory: "AMD EPYC, 2 cores, 8 GiB of memory"."""
    memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return f"{processor()}, {os.cpu_count()} cores, {memory_bytes / 2**30:.0f} GiB of memory"


def versions(definition: Definition, root: Path) -> dict[str, str]:
    """Returns versions by distribution: Python's, the kernels' libraries', the peers' it imports.

    Args:
        definition: the benchmark's file.
        root: the checkout; a peer in an environment of its own has its pin in bench/peers.
    """
    found = {"Python": platform.python_version()}
    owners = metadata.packages_distributions()
    ours = {path.parent.name for path in root.glob("packages/*/src/*/__init__.py")}
    imported = definition.imported_modules() - ours - _NO_PEERS
    names = {owner for module in imported for owner in owners.get(module, [])}
    for name in [*ALWAYS, *sorted(names - set(ALWAYS))]:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    for name in sorted(definition.started_peers()):
        pins = (root / "bench/peers" / f"{name}.txt").read_text(encoding="utf-8")
        match = re.search(rf"^{re.escape(name)}==(\S+)", pins, re.MULTILINE)
        if match:
            found[name] = match[1]
    return found


def commit(root: Path) -> str:
    """Returns the commit's first ten digits, marked when tracked files differ; "unknown" without git."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(root), *arguments]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        return done.stdout.strip()

    try:
        found = git("rev-parse", "--short=10", "HEAD")
        # Keeping one report must not mark the next run.
        changed = git("status", "--porcelain", "-uno", "--", ":/", ":!/bench/results")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{found} with changes" if changed else found
