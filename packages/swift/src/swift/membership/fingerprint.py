"""What the processes of a run must have in common for results to be equal bit for bit."""

from __future__ import annotations

import hashlib
import os
import platform
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

__all__ = ["describe_process", "first_difference"]


def describe_process(training: Mapping[str, Any]) -> dict[str, Any]:
    """This process's script with its own modules, settings, libraries and processor, and what it trains."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "script": _hash(Path(sys.argv[0])),
        "modules": _hash_modules(),
        "arguments": sys.argv[1:],
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "processor": [_processor(), torch.backends.cpu.get_cpu_capability()],
        "gpu": gpu,
        "default_dtype": str(torch.get_default_dtype()),
        "is_deterministic": torch.are_deterministic_algorithms_enabled(),
        "training": dict(training),
    }


def first_difference(ours: Any, theirs: Any, path: str = "") -> str | None:
    """Where two descriptions differ first, as "path: expected ..., got ..."; None if nowhere.

    Of modules, those that both have imported are compared: rank 0 may import a logger for itself.
    """
    if isinstance(ours, Mapping) and isinstance(theirs, Mapping):
        keys = dict.fromkeys([*ours, *theirs])
        if path == "modules":
            keys = [key for key in keys if key in ours and key in theirs]
        for key in keys:
            found = first_difference(ours.get(key), theirs.get(key), f"{path}.{key}".strip("."))
            if found:
                return found
        return None
    if isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        for at, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            found = first_difference(one, other, f"{path}[{at}]")
            if found:
                return found
        return None
    return None if ours == theirs else f"{path}: expected {ours!r}, got {theirs!r}"


def _hash_modules() -> dict[str, str]:
    """Of what was imported from the script's folder, packages that are installed there aside."""
    if not sys.argv[0] or not Path(sys.argv[0]).is_file():
        return {}
    folder = os.path.join(Path(sys.argv[0]).resolve().parent, "")
    # Names, not paths: there are thousands, and a spare is waited for.
    names = {getattr(one, "__file__", None) or "" for one in list(sys.modules.values())}
    return {
        name.removeprefix(folder): _hash(Path(name))
        for name in sorted(names)
        if name.startswith(folder) and "site-packages" not in Path(name).parts
    }


def _hash(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()[:16] if file.is_file() else ""


def _processor() -> str:
    with open("/proc/cpuinfo", encoding="utf-8") as lines:
        return next((line.split(":")[1].strip() for line in lines if "model name" in line), "")
