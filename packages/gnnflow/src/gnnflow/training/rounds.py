"""Rounds of a continual run: how a stream is cut into them, and the results of each."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np
import torch

from shared.data.events import Events
from shared.data.time_units import TIME_UNITS, guess_unit
from shared.errors import ConfigError, DataError
from shared.kernels.jit import compile_s

__all__ = ["STAGES", "Round", "StageClock", "check_span", "cut_increments", "parse_span"]

STAGES = ("insert", "evaluate", "sample", "fetch", "train")
_UNITS_S = {"s": 1, "min": 60, "h": 3600, "D": 86_400, "W": 604_800}


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """Results of one increment, which was evaluated and then trained on.

    The stages' seconds add up to the round's; sampling and fetching in an evaluation count as
    evaluation.

    Attributes:
        index: from 1; 0 is the warm-up, which is not evaluated.
        time: of the increment's first event.
        num_events: in the increment.
        num_replayed: past events trained on with it.
        loss: mean over the events trained on, last epoch.
        ap: average precision, one negative an event; NaN for the warm-up.
        auc: area under the ROC curve, one negative an event; NaN for the warm-up.
        mrr: mean reciprocal rank among all negatives of an event; NaN for the warm-up.
        insert_s: expiring and inserting, rows of features too.
        evaluate_s: all of the evaluation.
        sample_s: drawing what to replay, negatives and neighbours, for training.
        fetch_s: restoring the cache and fetching features, for training.
        train_s: forward, backward and update.
    """

    index: int
    time: int | float
    num_events: int
    num_replayed: int
    loss: float
    ap: float = math.nan
    auc: float = math.nan
    mrr: float = math.nan
    insert_s: float = 0.0
    evaluate_s: float = 0.0
    sample_s: float = 0.0
    fetch_s: float = 0.0
    train_s: float = 0.0

    @property
    def total_s(self) -> float:
        """Seconds of all stages."""
        return sum(getattr(self, f"{stage}_s") for stage in STAGES)

    def to_json(self) -> dict[str, Any]:
        """As a dictionary of numbers; NaN becomes None, since JSON has no NaN."""
        found = asdict(self)
        return {name: None if math.isnan(value) else value for name, value in found.items()}

    @classmethod
    def from_json(cls, row: dict[str, Any]) -> Round:
        """Inverse of `to_json`.

        Raises:
            DataError: names other than a round's.
        """
        names = {field.name for field in fields(cls)}
        if not isinstance(row, dict) or set(row) != names:
            raise DataError(f"expected a round with {sorted(names)}, got {row!r:.200}")
        values: dict[str, Any] = {k: math.nan if v is None else v for k, v in row.items()}
        return cls(**values)


class StageClock:
    """Seconds by stage; a stage inside another one counts as the outer one.

    Seconds in which a kernel's first call compiles it are in no stage.

    Args:
        device: device that is synchronised at a stage's end.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._is_running = False
        self._seconds = dict.fromkeys(STAGES, 0.0)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Adds the time spent inside to a stage."""
        if self._is_running:
            yield
            return
        self._is_running, started, before = True, time.perf_counter(), compile_s()
        try:
            yield
        finally:
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            spent = time.perf_counter() - started
            self._seconds[name] += spent - (compile_s() - before)
            self._is_running = False

    def take(self) -> dict[str, Any]:
        """Seconds since the last call, by a round's field."""
        taken = {f"{stage}_s": seconds for stage, seconds in self._seconds.items()}
        self._seconds = dict.fromkeys(STAGES, 0.0)
        return taken


def parse_span(name: str, value: str | float) -> float:
    """Parses a time span: a number, also as text, or a number and a unit, converted to seconds.

    Args:
        name: name of the setting, for messages.
        value: number above 0, or text such as "1D", "12h", "30min", "90s" or "2W".

    Raises:
        ConfigError: it is none of these.
    """
    number, unit = value, None
    if isinstance(value, str):
        match = re.fullmatch(r"(\d+(?:\.\d+)?)?\s*([A-Za-z]*)", value.strip())
        number, unit = (float(match[1] or 1), match[2]) if match and match[0] else (0.0, None)
        number *= _UNITS_S.get(unit, 0) if unit else 1
    if isinstance(number, str) or not 0 < number < math.inf:
        raise ConfigError(
            f"{name}: expected a number above 0 or a text such as '1D' with a unit among "
            f"{', '.join(_UNITS_S)}, got {value!r}"
        )
    return number


def check_span(name: str, value: object, events: Events) -> None:
    """Refuses a length such as "1D" for a stream whose times are too large for seconds.

    Args:
        name: of the setting.
        value: its value; numbers are in the stream's own unit, and pass.
        events: by time.

    Raises:
        DataError: times would be beyond the year 9999.
    """
    if not isinstance(value, str) or not any(map(str.isalpha, value)) or not len(events):
        return
    newest = events.t[-1].item()
    if guess := guess_unit(newest):
        raise DataError(
            f"{name}: expected times in seconds for {value!r}, got up to {newest}, which look like "
            f"{guess}; divide them by {TIME_UNITS[guess]:,}, or give a number in their own unit"
        )


def cut_increments(events: Events, warmup: float, every: int | str) -> tuple[int, list[int]]:
    """Cuts a stream into a warm-up and increments.

    Args:
        events: sorted by time.
        warmup: share of the events that come before the first increment.
        every: events per increment, or a time span as for `parse_span`: increments then begin at
            whole multiples of it after the first event that follows the warm-up, and empty ones are
            left out.

    Returns:
        Position of the first event after the warm-up, and end positions of the increments.

    Raises:
        ConfigError: the share is not in [0, 1), or `every` no length.
    """
    if not 0 <= warmup < 1:
        raise ConfigError(f"warmup: expected a share of 0 or more and below 1, got {warmup}")
    first = int(warmup * len(events))
    if isinstance(every, int):
        if every < 1:
            raise ConfigError(f"every: expected 1 event or more an increment, got {every}")
        return first, [*range(first + every, len(events), every), len(events)]
    step = parse_span("every", every)
    since = (events.t[first:] - events.t[first]).numpy() if first < len(events) else np.empty(0)
    changes = np.flatnonzero(np.diff(np.floor_divide(since, step)))
    return first, [*(first + 1 + changes).tolist(), len(events)]
