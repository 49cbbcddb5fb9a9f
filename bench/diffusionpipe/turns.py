"""Steps of several ways in turns on all ranks, and claims that benchmarks share."""

import time
from collections.abc import Callable, Collection, Mapping
from statistics import median
from typing import Any, NamedTuple

from torch import distributed

from shared.claims import Claim
from shared.comms import Group, barrier

__all__ = ["Turns", "compare", "gather", "list_ratios", "take_turns"]


class Turns(NamedTuple):
    """What ways did in turns.

    Attributes:
        steps: seconds [turn][rank] of each way; the first turns, which warm up, are left out.
        losses: by way, of all its steps, the first turns' too.
    """

    steps: dict[str, list[list[float]]]
    losses: dict[str, list[float]]

    def seconds(self, name: str) -> list[float]:
        """The slower rank's seconds of each turn."""
        return [max(turn) for turn in self.steps[name]]

    def describe(self) -> str:
        """Medians of all ways, and their spreads."""
        return ", ".join(
            f"{name} {median(own):.3f} ({min(own):.3f} to {max(own):.3f})"
            for name in self.steps
            for own in [self.seconds(name)]
        )


def gather(value: Any) -> list[Any]:
    """A value of each rank, on every rank."""
    values = [None] * distributed.get_world_size()
    distributed.all_gather_object(values, value)
    return values


def take_turns(
    ways: Mapping[str, Callable[[], float | None]],
    num_turns: int,
    *,
    num_warm: int = 2,
    num_steps: int = 1,
    rare: Collection[str] = (),
) -> Turns:
    """Runs a step or some of each way a turn, beginning with another one each turn.

    Args:
        ways: run a step and return the loss that this rank knows: of the whole batch, its mean over
            this rank's equal share of it, or None where another rank knows it.
        num_turns: measured ones.
        num_warm: turns before them.
        num_steps: of a way in a turn, of which the last is measured: those before it fetch the way's
            own weights into caches.
        rare: ways that step in every third turn only, as they are no training of their own.
    """
    group, names = Group.world(), list(ways)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    losses: dict[str, list[float | None]] = {name: [] for name in names}
    for turn in range(num_warm + num_turns):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            if name in rare and turn % 3:
                continue
            took_s = 0.0
            for _ in range(num_steps):
                barrier(group)
                began = time.perf_counter()
                losses[name].append(ways[name]())
                took_s = time.perf_counter() - began
            if turn >= num_warm:
                seconds[name].append(took_s)
    by_rank = gather((seconds, losses))
    return Turns(
        {name: [list(row) for row in zip(*(s[name] for s, _ in by_rank), strict=True)] for name in names},
        {
            name: [_mean(row) for row in zip(*(own[name] for _, own in by_rank), strict=True)]
            for name in names
        },
    )  # fmt: skip


def list_ratios(ours: list[float], baseline: list[float]) -> list[float]:
    """By turn, the baseline's seconds over ours."""
    return [b / a for a, b in zip(ours, baseline, strict=True)]


def compare(
    name: str, ours: list[float], baseline: list[float], baseline_name: str, **others: Any
) -> tuple[Claim, tuple[float, float]]:
    """A claim of seconds of two ways that took turns, and the spread of their ratios."""
    ratios = list_ratios(ours, baseline)
    claim = Claim(
        name=name,
        unit="s",
        ours=median(ours),
        baseline=median(baseline),
        baseline_name=baseline_name,
        higher_is_better=False,
        ratio=median(ratios),
        **others,
    )
    return claim, (min(ratios), max(ratios))


def _mean(values: tuple[float | None, ...]) -> float:
    known = [value for value in values if value is not None]
    return sum(known) / len(known)
