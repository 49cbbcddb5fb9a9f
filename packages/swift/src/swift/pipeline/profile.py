"""What is known of a pipeline's step when logged boundaries are chosen."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

from shared.errors import DataError
from shared.files import read_json

__all__ = ["Profile"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Profile:
    """A pipeline's step, measured.

    Attributes:
        replay_s: seconds in which each stage computes all micro-batches, which is what replaying takes.
        boundary_bytes: bytes of both directions of each boundary in a step.
        bytes_per_s: bandwidth of a boundary's link.
        step_s: seconds of a step of the whole pipeline.
    """

    replay_s: list[float]
    boundary_bytes: list[int]
    bytes_per_s: float
    step_s: float

    def to_json(self) -> str:
        """As JSON."""
        return json.dumps(dataclasses.asdict(self), indent=2)

    @staticmethod
    def load(path: str | Path) -> Profile:
        """From a file of `to_json`.

        Raises:
            DataError: there is no such file, or it is no JSON object of exactly these names.
        """
        record = read_json(path, "a profile of swift.profiler.measure")
        names = [field.name for field in dataclasses.fields(Profile)]
        if not isinstance(record, dict) or sorted(record) != sorted(names):
            got = ", ".join(sorted(record)) if isinstance(record, dict) else type(record).__name__
            raise DataError(
                f"{path}: expected a profile with {', '.join(names)}, got {got}; measure one"
            )
        return Profile(**record)
