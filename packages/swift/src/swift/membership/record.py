"""The run's record: what each recovery took on each rank, kept by the first supervisor."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from shared.errors import ConfigError
from shared.files import write_atomically

__all__ = ["FailureRecord", "expect_picture"]

_FORMAT = 1


class FailureRecord:
    """Failures so far; written to a file at once and after each, where there is one."""

    def __init__(self, file: Path | None, picture: Path | None = None) -> None:
        """Writes a file without failures.

        Args:
            file: of the report, JSON.
            picture: SVG file, for the newest failure, drawn as the run ends.

        Raises:
            ConfigError: one of them cannot be written, or the picture is of another kind. Later this is
                said on stderr, and the run goes on.
        """
        self._file, self._picture = file, picture
        self._by_epoch: dict[int, dict[str, Any]] = {}
        self._is_told = False
        try:
            self._try_to_write(None)
        except OSError as error:
            raise ConfigError(
                f"--report {file}: expected a file that can be written, got {error}; give another path"
            ) from error
        if picture is not None:
            expect_picture(picture)

    def add(self, record: dict[str, Any]) -> None:
        """Adds one rank's account of a recovery."""
        epoch = record["epoch"]
        shown = {key: record[key] for key in ("epoch", "lost", "reason", "target", "world_size")}
        failure = self._by_epoch.setdefault(epoch, {**shown, "ranks": {}})
        failure["ranks"][str(record["rank"])] = {
            key: record[key] for key in ("seconds", "received_bytes", "undone", "is_newcomer")
        } | {"difference": record.get("difference")}
        self._write(None)

    def failures(self) -> list[dict[str, Any]]:
        """One record a recovery, in order."""
        return [self._by_epoch[epoch] for epoch in sorted(self._by_epoch)]

    def finish(self, reason: str) -> None:
        """Writes how the run ended: "" where all is done."""
        self._write(reason)
        if self._picture is not None and self._by_epoch:
            self._draw(self._picture)

    def _draw(self, picture: Path) -> None:
        from swift.timeline import draw_record  # matplotlib takes a second

        try:
            draw_record(self.failures()[-1], picture)
        except OSError as error:
            sys.stderr.write(
                f"meshyard-swift: the picture {picture} could not be written: {error}; the report has its "
                f"figures\n"
            )

    def _write(self, ended: str | None) -> None:
        try:
            self._try_to_write(ended)
        except OSError as error:
            if not self._is_told:
                sys.stderr.write(
                    f"meshyard-swift: the report {self._file} could not be written: {error}\n"
                )
            self._is_told = True

    def _try_to_write(self, ended: str | None) -> None:
        if self._file is not None:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            record = {"format": _FORMAT, "ended": ended, "failures": self.failures()}
            write_atomically(self._file, json.dumps(record, indent=1) + "\n")


def expect_picture(path: Path) -> None:
    """Checks that a picture can be written there.

    Raises:
        ConfigError: it is no SVG file, or cannot be written.
    """
    if path.suffix != ".svg":
        raise ConfigError(
            f"--picture {path}: expected a file .svg, got {path.suffix!r}; name it so"
        )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir() or not os.access(path.parent, os.W_OK):
            raise PermissionError(f"no file can be made at {path}")
    except OSError as error:
        raise ConfigError(
            f"--picture {path}: expected a file that can be written, got {error}; give another path"
        ) from error
