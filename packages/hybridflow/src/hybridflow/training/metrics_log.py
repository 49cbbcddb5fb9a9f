"""Metrics of a run in files: JSON lines, and TensorBoard's format if that is installed."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

__all__ = ["Journal"]


class Journal:
    """Writes metrics of steps as JSON lines, and for TensorBoard if it is installed."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = (folder / "metrics.jsonl").open("a")
        self._board: Any = None
        if importlib.util.find_spec("tensorboard"):
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(str(folder / "tensorboard"))

    def write(self, told: dict[str, float]) -> None:
        """Writes the metrics of one step."""
        self._file.write(json.dumps(told) + "\n")
        self._file.flush()
        if self._board is not None:
            for name, value in told.items():
                self._board.add_scalar(name, value, int(told["step"]))

    def close(self) -> None:
        """Closes the files."""
        self._file.close()
        if self._board is not None:
            self._board.close()
