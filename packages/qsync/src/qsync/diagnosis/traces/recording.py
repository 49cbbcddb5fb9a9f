"""Records a rank's training steps as `diagnose` reads them."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from torch.profiler import ProfilerActivity, profile, schedule

__all__ = ["record_steps"]


def record_steps(
    run_step: Callable[[], object],
    path: str | os.PathLike[str],
    *,
    num_steps: int = 8,
    has_memory: bool = False,
) -> None:
    """Runs training steps and exports their trace; every rank calls it, for the same steps.

    Two more steps run before: what the first ones set up and the profiler's own start are not
    traced.

    Args:
        run_step: runs one step, from fetching a batch to the optimizer.
        path: .json or .json.gz file of this rank.
        num_steps: steps to trace.
        has_memory: whether allocations are traced too.

    Raises:
        OSError: the file cannot be written.
    """
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with profile(
        activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA],
        schedule=schedule(wait=1, warmup=1, active=num_steps, repeat=1),
        record_shapes=True,
        profile_memory=has_memory,
    ) as profiler:
        for _ in range(num_steps + 2):
            run_step()
            profiler.step()
    profiler.export_chrome_trace(os.fspath(path))
