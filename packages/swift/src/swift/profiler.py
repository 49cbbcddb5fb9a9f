"""Measures what choosing logged boundaries needs: each stage's computation and each boundary's bytes."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

import torch

from shared.comms import Group, all_gather
from shared.errors import ConfigError
from swift.pipeline.profile import Profile
from swift.pipeline.stage import PipelineStage

__all__ = ["measure"]


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
