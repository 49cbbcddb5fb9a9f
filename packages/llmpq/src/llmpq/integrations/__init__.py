"""Plans for other engines: a folder they load, or the settings they take.

An export is a function of plan, model folder and destination that writes what the engine reads and
returns lines that say how to use it. `EXPORTS` lists them by the engine's name.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from shared.registry import Registry

if TYPE_CHECKING:
    from llmpq.planner.plan import Plan

__all__ = ["EXPORTS", "SUFFIXES", "export"]

_HERE = "llmpq.integrations"

EXPORTS: Registry[str, Any] = Registry("export")
"""Functions of plan, folder and destination, by engine; imported when one is asked for."""
EXPORTS.add(
    "compressed-tensors", f"{_HERE}.compressed_tensors:export", "a folder that transformers loads"
)
EXPORTS.add("vllm", f"{_HERE}.vllm:export", "a folder, and vLLM's split of layers")
EXPORTS.add("llama.cpp", f"{_HERE}.llama_cpp:export", "llama.cpp's options for split and widths")
EXPORTS.add("device-map", f"{_HERE}.device_map:export", "a device_map of accelerate")

SUFFIXES = {"llama.cpp": ".sh", "device-map": ".json"}
"""How the files of engines that take settings alone end; others write a folder."""


def export(plan: Plan, target: str, folder: str | Path, out: str | Path) -> list[str]:
    """Writes a plan for another engine.

    Args:
        plan: the plan.
        target: one of `EXPORTS`.
        folder: the Hugging Face model that the plan is for.
        out: folder to write, or for settings alone the file.

    Returns:
        Lines that say how to use what was written.

    Raises:
        ConfigError: the target is unknown, or its engine cannot run the plan; says why.
        DataError: a weight is missing or not finite.
    """
    return EXPORTS.get(target)(plan, Path(folder), Path(out))
