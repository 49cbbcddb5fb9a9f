"""Which checkpoints of a run stay: the newest, those at an interval, and the best by a metric."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from shared.errors import ConfigError

__all__ = ["Best", "Retention", "check_metric"]

Best = Literal["max", "min"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """The rule; a checkpoint stays if any part of it keeps it.

    Attributes:
        keep: number of newest checkpoints that stay; None: all.
        keep_every: steps that are multiples of it stay.
        keep_best: number of checkpoints with the best metrics that stay.
        best: whether the largest or the smallest metric is the best.

    Raises:
        ConfigError: a number is below 1, or one adds to a `keep` that keeps all.
    """

    keep: int | None = None
    keep_every: int | None = None
    keep_best: int | None = None
    best: Best = "max"

    def __post_init__(self) -> None:
        for name in ("keep", "keep_every", "keep_best"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name}: expected at least 1, got {value}")
            if value is not None and self.keep is None:
                raise ConfigError(
                    f"{name}: expected keep with it, as all checkpoints stay without; give keep=1"
                )
        if self.best not in ("max", "min"):
            raise ConfigError(f"best: expected 'max' or 'min', got {self.best!r}")

    def find_removable(
        self, steps: list[int], newest: int, metrics: Mapping[int, float]
    ) -> list[int]:
        """The steps whose checkpoints go, ascending.

        Args:
            steps: steps of the run, ascending.
            newest: step that was saved last, which stays though others may have larger numbers.
            metrics: metrics by step, of those that have one; NaN is none.
        """
        if self.keep is None:
            return []
        others = [step for step in steps if step != newest]
        kept = {newest, *others[max(0, len(others) - self.keep + 1) :]}
        if self.keep_every is not None:
            kept |= {step for step in steps if step % self.keep_every == 0}
        if self.keep_best is not None:
            sign = -1 if self.best == "max" else 1
            known = [step for step in steps if not math.isnan(metrics.get(step, math.nan))]
            # Of equal ones the later stays.
            kept |= {
                *sorted(known, key=lambda step: (sign * metrics[step], -step))[: self.keep_best]
            }
        return [step for step in steps if step not in kept]


def check_metric(keep_best: int | None, metric: object) -> None:
    """Refuses to keep the best of checkpoints that have no metric, none of which would be kept.

    Raises:
        ConfigError: `metric` is None, and `keep_best` is not.
    """
    if keep_best is not None and metric is None:
        raise ConfigError(
            "keep_best: expected a metric with each save, got none; give metric, as NaN where it was "
            "not measured, or leave keep_best out"
        )
