"""Metrics of a run as JSON lines."""

from __future__ import annotations

import json
from pathlib import Path

__all__ = ["Journal"]


class Journal:
    """Writes metrics of steps as JSON lines."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = (folder / "metrics.jsonl").open("a")

    def write(self, told: dict[str, float]) -> None:
        """Writes the metrics of one step."""
        self._file.write(json.dumps(told) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Closes the file."""
        self._file.close()
