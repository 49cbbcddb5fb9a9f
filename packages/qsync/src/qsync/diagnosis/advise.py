"""Advice by a greedy search along the critical path, over the strategies of the registry."""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from typing import NamedTuple

from qsync.diagnosis.diagnose import Diagnosis
from qsync.diagnosis.memory_timeline import trace_memory
from qsync.diagnosis.strategies import STRATEGIES, AdviceState, Proposal
from qsync.diagnosis.what_if import JobChange, JobForecast

__all__ = ["Advice", "advise"]

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


class _Option(NamedTuple):
    name: str
    proposal: Proposal
    after: JobForecast
    gain: float
    saves: int


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
        memories = [m for trace in diagnosis.traces for m in trace_memory(trace).values()]
        fullest = max(memories, key=lambda memory: memory.peak_bytes)
        excess_bytes = fullest.peak_bytes - memory_limit_bytes
        activation_bytes = fullest.activation_bytes
    forecast = diagnosis.job.predict()
    change, advice, saved_bytes = JobChange(), [], 0
    makers = {name: STRATEGIES.get(name) for name in strategies or STRATEGIES}
    while True:
        state = AdviceState(diagnosis=diagnosis, change=change, forecast=forecast)
        options = []
        for name, make in makers.items():
            for proposal in make(state):
                after = diagnosis.job.predict(proposal.change)
                saves = int(proposal.saved_share * (activation_bytes - saved_bytes))
                options.append(
                    _Option(name, proposal, after, forecast.step_s / after.step_s, saves)
                )
        needed_bytes = excess_bytes - saved_bytes
        if needed_bytes > 0:
            ranked = [((min(o.saves, needed_bytes), o.gain), o) for o in options if o.saves > 0]
        else:
            ranked = [
                ((o.proposal.is_same_batch, o.gain), o)
                for o in options
                if o.gain >= 1 + _WORTHWHILE
            ]
        if not ranked:
            return advice
        _, best = max(ranked, key=itemgetter(0))
        saved_bytes += best.saves
        change, forecast = best.proposal.change, best.after
        advice.append(
            Advice(best.name, best.proposal.text, change, forecast.step_s, best.gain, saved_bytes)
        )
