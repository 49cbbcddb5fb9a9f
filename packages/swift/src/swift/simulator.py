"""How long a training takes on machines that fail, by ways to recover; simulated, nothing is run.

A failure costs an outage (detection, a new world, state) and then the repetition of steps since the last
checkpoint at some rate: none with a replica, a replay without bubbles with logged boundaries, all of
them with checkpoints alone. The torn step is always repeated. Failures come also while recovering, which
then begins anew, and while a checkpoint is written, which then does not count.

For checkpoints the interval is after Young (1974) and Daly (2006), sqrt(2 C M) for checkpoints of C
seconds and failures every M; where a second of work is repeated in r seconds, sqrt(2 C M / r).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from shared.errors import ConfigError

__all__ = [
    "Outcome",
    "Recovery",
    "Training",
    "choose_interval",
    "compare",
    "draw_failures",
    "simulate",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class Training:
    """What is trained.

    Attributes:
        num_steps: to be done.
        step_s: seconds of an undisturbed step.
        checkpoint_s: seconds for which a checkpoint stops training.
        interval: steps between checkpoints; None: there are none, and the start is the only one.
    """

    num_steps: int
    step_s: float
    checkpoint_s: float = 0.0
    interval: int | None = None

    def __post_init__(self) -> None:
        """Checks the numbers."""
        if self.num_steps < 1 or not self.step_s > 0 or not self.checkpoint_s >= 0:
            raise ConfigError(
                f"expected num_steps and step_s above 0 and checkpoint_s of at least 0, got "
                f"{self.num_steps}, {self.step_s} and {self.checkpoint_s}"
            )
        if self.interval is not None and self.interval < 1:
            raise ConfigError(f"expected an interval of at least one step, got {self.interval}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Recovery:
    """What a failure costs.

    Attributes:
        outage_s: seconds from the failure until the ranks go on or begin to repeat.
        repeat_step_s: seconds in which a step since the last checkpoint is repeated; 0: none is.
    """

    outage_s: float
    repeat_step_s: float = 0.0

    def __post_init__(self) -> None:
        """Checks the numbers."""
        if not self.outage_s >= 0 or not self.repeat_step_s >= 0:
            raise ConfigError(
                f"expected seconds of at least 0, got {self.outage_s} and {self.repeat_step_s}"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What a simulated training took.

    Attributes:
        total_s: all of it.
        num_failures: that it went through.
        outage_s: in outages.
        repeated_s: repeating steps, the torn ones included.
        checkpoint_s: writing checkpoints, also ones that failed.
    """

    total_s: float
    num_failures: int
    outage_s: float
    repeated_s: float
    checkpoint_s: float


def simulate(training: Training, recovery: Recovery, failures: Iterable[float]) -> Outcome:
    """Goes through a training step by step.

    Args:
        training: what is trained.
        recovery: what a failure costs.
        failures: seconds from the start at which a machine fails, ascending, perhaps without end.
    """
    times = iter(failures)
    failure = next(times, math.inf)
    now, step, saved = 0.0, 0, 0
    num_failures, outage_s, repeated_s, checkpoint_s = 0, 0.0, 0.0, 0.0
    while step < training.num_steps:
        is_due = training.interval is not None and step % training.interval == 0 and step > saved
        end = now + (training.checkpoint_s if is_due else training.step_s)
        if failure >= end:
            if is_due:
                saved = step
                checkpoint_s += end - now
            else:
                step += 1
            now = end
            continue
        repeated_s += 0.0 if is_due else failure - now
        checkpoint_s += failure - now if is_due else 0.0
        repeat_s = recovery.repeat_step_s * (step - saved)
        end = failure
        while failure <= end:
            num_failures += 1
            now, failure = failure, next(times, math.inf)
            begun = min(now + recovery.outage_s, failure)
            end = min(begun + repeat_s, failure)
            outage_s += begun - now
            repeated_s += end - begun
            now = end
    return Outcome(
        total_s=now, num_failures=num_failures, outage_s=outage_s, repeated_s=repeated_s,
        checkpoint_s=checkpoint_s,
    )  # fmt: skip


def draw_failures(mtbf_s: float, num_machines: int, seed: int) -> Iterator[float]:
    """Seconds at which any of many machines fails, each on average after `mtbf_s` seconds.

    Raises:
        ConfigError: a number is not positive.
    """
    if not mtbf_s > 0 or num_machines < 1:
        raise ConfigError(
            f"expected mtbf_s above 0 and at least one machine, got {mtbf_s} and {num_machines}"
        )
    draw = np.random.default_rng(seed)
    now = 0.0
    while True:
        now += float(draw.exponential(mtbf_s / num_machines))
        yield now


def choose_interval(
    step_s: float, checkpoint_s: float, mtbf_s: float, recovery: Recovery, num_steps: int
) -> int | None:
    """Steps between checkpoints, after Young and Daly; None: failures repeat nothing.

    Args:
        step_s: seconds of a step.
        checkpoint_s: seconds of a checkpoint.
        mtbf_s: seconds between failures of any machine.
        recovery: what a failure costs.
        num_steps: of the training, beyond which there is no interval.
    """
    rate = recovery.repeat_step_s / step_s
    if not rate:
        return None
    return min(max(round(math.sqrt(2 * checkpoint_s * mtbf_s / rate) / step_s), 1), num_steps)


def compare(
    training: Training, recoveries: dict[str, Recovery], mtbf_s: float, num_machines: int,
    seeds: Iterable[int],
) -> dict[str, tuple[int | None, list[Outcome]]]:  # fmt: skip
    """Ways to recover under the same failures, each with its own best interval.

    Args:
        training: what is trained; its interval is not used.
        recoveries: by name.
        mtbf_s: seconds between failures of one machine.
        num_machines: of the cluster.
        seeds: of the failures; an outcome each.

    Returns:
        By name: the interval, and the outcomes by seed.
    """
    found = {}
    seeds = list(seeds)
    for name, recovery in recoveries.items():
        interval = choose_interval(
            training.step_s, training.checkpoint_s, mtbf_s / num_machines, recovery,
            training.num_steps,
        )  # fmt: skip
        planned = replace(training, interval=interval)
        found[name] = (
            interval,
            [
                simulate(planned, recovery, draw_failures(mtbf_s, num_machines, seed))
                for seed in seeds
            ],
        )
    return found
