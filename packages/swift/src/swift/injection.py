"""Faults at chosen moments: a rank kills or stops itself when it reaches a point of the program.

Tests and benchmarks `arm` them; `meshyard-swift inject` disturbs a run from outside.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from shared.errors import ConfigError

__all__ = ["POINTS", "Fault", "arm", "reach", "stand_at"]

POINTS = (
    "forward",
    "backward",
    "start",
    "reduce",
    "mark",
    "update",
    "vote",
    "finish",
    "join",
    "undo",
    "transfer",
    "replay",
    "load",
    "verify",
    "checkpoint",
    "commit",
)
"""Points in the order of a step, of a recovery and of a checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One process kills or stops itself.

    Attributes:
        rank: which rank.
        recovery: number of recoveries that came before; a repeated step does not repeat the fault.
        point: one of POINTS.
        step: at which step; None: any.
        bucket: at which bucket, of a pipeline micro-batch, where the point has some; None: any.
        kind: "kill" (SIGKILL) or "stop" (SIGSTOP).
        after_s: seconds that it waits there first, while the others go on as far as they can.
    """

    rank: int
    recovery: int
    point: str
    step: int | None = None
    bucket: int | None = None
    kind: Literal["kill", "stop"] = "kill"
    after_s: float = 0.0

    def __post_init__(self) -> None:
        """Checks the point."""
        if self.point not in POINTS:
            raise ConfigError(f"point: expected one of {', '.join(POINTS)}, got {self.point!r}")


_faults: list[Fault] = []
_here: tuple[int | None, int, int] = (None, -1, -1)


def arm(faults: Iterable[Fault]) -> None:
    """Arms faults in this process; call it on all ranks and spares."""
    _faults[:] = faults


def stand_at(rank: int, recovery: int, step: int) -> None:
    """Says where this process is; the training loop calls it."""
    global _here
    _here = (rank, recovery, step)


def reach(point: str, *, bucket: int | None = None) -> None:
    """Commits a fault that is armed for this point and place."""
    for fault in _faults:
        if (
            fault.point == point
            and (fault.rank, fault.recovery) == _here[:2]
            and fault.step in (None, _here[2])
            and fault.bucket in (None, bucket)
        ):
            time.sleep(fault.after_s)
            os.kill(os.getpid(), signal.SIGKILL if fault.kind == "kill" else signal.SIGSTOP)
