"""What failed, and what each recovery took: on a rank, and of a run's report file."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shared.errors import DataError
from shared.files import read_json
from shared.units import format_bytes, format_s

__all__ = ["PHASES", "RecoveryReport", "describe_failures", "read_failures"]

PHASES = ("detect", "join", "undo", "transfer", "verify", "repeat")
"""Of a recovery: from when the lost rank ended, or was heard of last, until this rank is free of the old
world; the new world; deciding and undoing; refilling; comparing digests; the first step after."""


class RecoveryReport:
    """A rank's account of its recoveries; `str` of it is a paragraph a recovery.

    Attributes:
        records: one a recovery, in order.
        waits_for: what makes all updates of a step wait for its last sum; None where nothing does.
    """

    def __init__(self) -> None:
        self.records: list[dict[str, Any]] = []
        self.waits_for: str | None = None
        self._record: dict[str, Any] | None = None
        self._since_s = 0.0

    def __str__(self) -> str:
        failures = describe_failures(self.records)
        if self.waits_for is None:
            return failures
        return f"{failures}\nAll updates of a step wait for its last sum: {self.waits_for} needs all gradients."

    def draw(self, path: str | Path) -> None:
        """Draws this rank's newest failure, second by second; `run --picture` draws all ranks.

        Args:
            path: of the SVG file.

        Raises:
            DataError: no rank was lost.
        """
        from swift.timeline import draw_record  # matplotlib takes a second

        if not self.records:
            raise DataError("expected a failure to draw, got none: no rank was lost so far")
        draw_record(self.records[-1], Path(path))

    def begin(
        self, epoch: int, rank: int, lost: Sequence[Mapping[str, Any]], *, is_newcomer: bool
    ) -> None:
        """A recovery begins: the rank is free of its old world."""
        self._since_s = time.monotonic()
        lost_s = min((one["since_s"] for one in lost), default=self._since_s)
        self._record = {
            "epoch": epoch,
            "rank": rank,
            "lost": [{key: one[key] for key in ("rank", "how")} for one in lost],
            "is_newcomer": is_newcomer,
            "seconds": {"detect": self._since_s - lost_s},
        }

    def end(self, phase: str) -> None:
        """A phase of the recovery ends."""
        if self._record is not None:
            now_s = time.monotonic()
            self._record["seconds"][phase] = now_s - self._since_s
            self._since_s = now_s

    def decide(
        self, reason: str, target: int | None, world_size: int, undone: int, received_bytes: int
    ) -> None:
        """What was decided and moved."""
        if self._record is not None:
            self._record |= {
                "reason": reason,
                "target": target,
                "world_size": world_size,
                "undone": undone,
                "received_bytes": received_bytes,
            }

    def complete(self) -> dict[str, Any] | None:
        """The first step after a recovery has ended: its record, None if there was no loss."""
        record, self._record = self._record, None
        if record is None or "reason" not in record or not record["lost"]:
            return None
        record["seconds"]["repeat"] = time.monotonic() - self._since_s
        self.records.append(record)
        return record

    def add_difference(self, difference: str) -> None:
        """Adds to the newest recovery's record how its torn step came out when it was repeated."""
        if self.records:
            self.records[-1]["difference"] = difference


def read_failures(path: str | Path) -> list[dict[str, Any]]:
    """Reads the failures of a file that `meshyard-swift run --report` wrote.

    Raises:
        DataError: it is no such file.
    """
    record = read_json(path, "a report of `meshyard-swift run --report`")
    try:
        return record["failures"]
    except (KeyError, TypeError) as error:
        raise DataError(
            f"{path}: expected a report of `meshyard-swift run --report`, got {error!r}"
        ) from error


def describe_failures(records: Sequence[Mapping[str, Any]]) -> str:
    """A paragraph a recovery, of a rank's records or of a run's failures."""
    if not records:
        return "no rank was lost"
    return "\n".join(_describe(record) for record in records)


def _describe(record: Mapping[str, Any]) -> str:
    ranks = record.get("ranks") or {str(record["rank"]): record}
    lost = ", ".join(f"rank {one['rank']} {one['how']}" for one in record["lost"])
    longest = {
        phase: max(one["seconds"].get(phase, 0.0) for one in ranks.values()) for phase in PHASES
    }
    moved = sum(one["received_bytes"] for one in ranks.values())
    undone = sum(one["undone"] for one in ranks.values())
    phases = ", ".join(f"{phase} {format_s(seconds)}" for phase, seconds in longest.items())
    differences = "".join(
        f"\nRank {rank}: {one['difference']}."
        for rank, one in ranks.items()
        if one.get("difference")
    )
    return (
        f"{lost}: {record['reason'].rstrip('.')}. On with step {record['target']} and {record['world_size']} "
        f"ranks. {phases}; {format_bytes(moved)} moved, {undone} parameters undone.{differences}"
    )
