"""Advice by a greedy search along the critical path, over the strategies of the registry."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from operator import itemgetter
from typing import NamedTuple

from qsync.diagnosis.diagnose import Diagnosis
from qsync.diagnosis.memory_peaks import find_peaks
from qsync.diagnosis.strategies import STRATEGIES, AdviceState
from qsync.diagnosis.what_if import JobChange
from shared.errors import DataError
from shared.units import format_bytes

__all__ = ["Advice", "advise"]

_log = logging.getLogger(__name__)
# Gains below this share of a step are within the noise of traces.
_WORTHWHILE = 0.01


class Advice(NamedTuple):
    """One change, on top of those before it.

    Attributes:
        strategy: its name in `STRATEGIES`.
        text: what to do.
        change: all changes until here.
        step_s: predicted seconds of a step with all of them.
        gain: step before this change over step after it.
        saved_bytes: memory saved on the fullest rank by all changes.
    """

    strategy: str
    text: str
    change: JobChange
    step_s: float
    gain: float
    saved_bytes: int


def advise(
    diagnosis: Diagnosis,
    *,
    strategies: Sequence[str] | None = None,
    memory_limit_bytes: int | None = None,
) -> list[Advice]:
    """Searches for changes that shorten the step, or bring its memory below a limit first.

    Each round replays every proposal and takes the best: while memory is above the limit, the one
    that reaches it at the least cost, or saves most if none does; then the one with the largest
    gain, until none gains 1 %. Changes of the global batch come last, after all that keep it.

    Args:
        diagnosis: of the traced job.
        strategies: those to try; all of `STRATEGIES` if None.
        memory_limit_bytes: of the fullest device; traces must have memory events.

    Raises:
        ConfigError: a strategy is not registered.
        DataError: a limit is given and traces have no memory events.
    """
    excess_bytes = activation_bytes = 0
    if memory_limit_bytes is not None:
        peaks = [peak for trace in diagnosis.traces for peak in find_peaks(trace).values()]
        if not peaks:
            raise DataError(
                f"{diagnosis.traces[0].path}: expected memory events, got none; record with "
                "profile_memory=True"
            )
        fullest = max(peaks)
        excess_bytes = fullest.peak_bytes - memory_limit_bytes
        activation_bytes = fullest.peak_bytes - fullest.kept_bytes
    job, change, advice, saved_bytes = diagnosis.job, JobChange(), [], 0
    makers = {name: STRATEGIES.get(name) for name in strategies or STRATEGIES}
    while True:
        now = AdviceState(diagnosis=diagnosis, change=change, forecast=job.predict(change))
        options: list[tuple[tuple[float, float], Advice]] = []
        for name, make in makers.items():
            for changed, text in make(now):
                step_s = job.predict(changed).step_s
                gain = now.forecast.step_s / step_s
                saves = int((1 - changed.activation_share) * activation_bytes)
                option = Advice(name, text, changed, step_s, gain, saves)
                is_same_batch = changed.accumulation == change.accumulation
                if saved_bytes >= excess_bytes and gain >= 1 + _WORTHWHILE:
                    options.append(((is_same_batch, gain), option))
                elif saved_bytes < min(excess_bytes, saves):
                    options.append(((min(saves, excess_bytes), gain), option))
        if not options:
            if saved_bytes < excess_bytes:
                missing = format_bytes(excess_bytes - saved_bytes)
                _log.warning("memory: the job stays %s above the limit under all changes", missing)
            return advice
        _, best = max(options, key=itemgetter(0))
        change, saved_bytes = best.change, best.saved_bytes
        advice.append(best)
