"""Measures what choosing logged boundaries needs: each stage's computation and each boundary's bytes."""

from __future__ import annotations

import dataclasses
import itertools
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from shared.comms import Group, all_gather
from shared.errors import ConfigError, DataError
from swift.pipeline.stage import PipelineStage

__all__ = ["Profile", "measure"]


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
    def from_json(text: str) -> Profile:
        """From `to_json`.

        Raises:
            DataError: it is no JSON object of exactly these names.
        """
        try:
            record: Any = json.loads(text)
        except ValueError as error:
            raise DataError(f"expected a profile in JSON, got {error}; measure one") from error
        names = [field.name for field in dataclasses.fields(Profile)]
        if not isinstance(record, dict) or sorted(record) != sorted(names):
            got = ", ".join(sorted(record)) if isinstance(record, dict) else type(record).__name__
            raise DataError(f"expected a profile with {', '.join(names)}, got {got}; measure one")
        return Profile(**record)


def measure(
    stage: PipelineStage, group: Group, step: Callable[[], Any], num_steps: int, bytes_per_s: float
) -> Profile:
    """Runs steps and measures them; every rank of the pipeline calls it.

    Args:
        stage: this rank's.
        group: of all stages.
        step: one step of this rank, which calls `stage.step`.
        num_steps: that are measured, after one that is not.
        bytes_per_s: bandwidth of a boundary's link, which is not measured.

    Raises:
        ConfigError: there is no step, or no bandwidth.
        CommError: a rank died.
    """
    if num_steps < 1 or not bytes_per_s > 0:
        raise ConfigError(
            f"expected num_steps and bytes_per_s above 0, got {num_steps} and {bytes_per_s}"
        )
    step()
    compute_s, sent = stage.compute_s, dict(stage.sent_bytes)
    start = time.perf_counter()
    for _ in range(num_steps):
        step()
    step_s = (time.perf_counter() - start) / num_steps
    words = [
        (stage.compute_s - compute_s) / num_steps,
        step_s,
        *((stage.sent_bytes[kind] - sent[kind]) / num_steps for kind in sorted(sent)),
    ]
    rows = [row.tolist() for row in all_gather(group, torch.tensor(words, dtype=torch.float64))]
    return Profile(
        replay_s=[row[0] for row in rows],
        boundary_bytes=[round(before[2] + after[3]) for before, after in itertools.pairwise(rows)],
        bytes_per_s=bytes_per_s,
        step_s=max(row[1] for row in rows),
    )
