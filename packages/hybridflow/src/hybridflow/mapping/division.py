"""The best division of a cluster's GPUs among the sets of one partition, without enumerating them.

A stage takes as long as its slowest set. So for a single stage and a given time, each set needs the
least number of GPUs that keeps it within that time, and going through all times gives the best
division for every number of GPUs. Sets that only score take part in one stage and are divided in
this way. Sets that are trained take part in two or three stages; a table pairs their ways, and
every cell leaves the remaining GPUs to the scoring sets.
"""

from __future__ import annotations

from collections.abc import Mapping as Dictionary
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

import numpy as np
from jaxtyping import Float64, Int64

from hybridflow.mapping.front import Choice, Front, pareto
from hybridflow.mapping.hardware import Hardware

__all__ = ["Curve", "Division", "divide", "lower_bound_s"]

# Most cells of the table in memory at once.
_CELLS = 1 << 20

_Choices = tuple[Choice, ...]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Curve:
    """Ways to run one or more sets, by their total number of GPUs.

    Attributes:
        num_gpus: [ways] GPUs in all, ascending.
        stage_s: [ways, 3] seconds of the stages.
        choices: [ways] for each set a choice for each of its models.
    """

    num_gpus: Int64[np.ndarray, " ways"]
    stage_s: Float64[np.ndarray, "ways 3"]
    choices: list[tuple[_Choices, ...]]

    def __len__(self) -> int:
        return len(self.choices)

    @classmethod
    def over(cls, fronts: Dictionary[int, Front]) -> Curve:
        """The ways of one set for all numbers of GPUs it may have, without dominated ones."""
        rows = [
            (num_gpus, *seconds)
            for num_gpus, front in fronts.items()
            for seconds in front.stage_s.tolist()
        ]
        choices: list[tuple[_Choices, ...]] = [
            (way,) for front in fronts.values() for way in front.choices
        ]
        return cls._of(np.array(rows, dtype=np.float64).reshape(-1, 4), choices)

    @classmethod
    def _of(cls, rows: np.ndarray, choices: list[tuple[_Choices, ...]]) -> Curve:
        kept = pareto(rows)
        return cls(
            num_gpus=rows[kept, 0].astype(np.int64),
            stage_s=rows[kept, 1:],
            choices=[choices[way] for way in kept],
        )

    def beside(self, other: Curve, num_gpus: int) -> Curve:
        """Combines the ways of these and other sets on at most `num_gpus` GPUs in all."""
        total = self.num_gpus[:, None] + other.num_gpus[None, :]
        mine, theirs = np.nonzero(total <= num_gpus)
        slowest = np.maximum(self.stage_s[mine], other.stage_s[theirs])
        rows = np.column_stack([total[mine, theirs], slowest])
        kept = pareto(rows)
        return Curve(
            num_gpus=rows[kept, 0].astype(np.int64),
            stage_s=rows[kept, 1:],
            choices=[self.choices[mine[i]] + other.choices[theirs[i]] for i in kept],
        )

    def first_within(self, stage: int, within_s: Float64[np.ndarray, " times"]) -> np.ndarray:
        """[times] index of the first way whose stage takes no longer; `len(self)` if none."""
        fastest_s = np.minimum.accumulate(self.stage_s[:, stage])
        return np.searchsorted(-fastest_s, -within_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class Division:
    """A way for each set of a partition.

    Attributes:
        step_s: seconds of a step.
        choices: for each set a choice for each of its models.
    """

    step_s: float
    choices: tuple[_Choices, ...]


def lower_bound_s(curves: Sequence[Curve], hardware: Hardware) -> float:
    """Lower bound of a step's seconds: each stage with the division that is best for it alone.

    Infinite if the sets together do not fit.
    """
    return sum(float(_least_slowest_s(curves, stage, hardware.num_gpus)[-1]) for stage in range(3))


def divide(curves: Sequence[Curve], hardware: Hardware) -> Division | None:
    """The best division; None if the sets together do not fit.

    O(ways of the actor's set x ways of the other trained sets), plus O(ways of two trained sets
    multiplied, times those kept) where three or more sets are trained.
    """
    num_gpus = hardware.num_gpus
    # Only the actor generates, actor and critics are trained, and other models only score.
    acting = next(curve for curve in curves if curve.stage_s[:, 0].any())
    scoring = [curve for curve in curves if not curve.stage_s[:, [0, 2]].any()]
    others = [curve for curve in curves if curve is not acting and curve.stage_s[:, 2].any()]
    nothing = Curve(num_gpus=np.zeros(1, dtype=np.int64), stage_s=np.zeros((1, 3)), choices=[()])
    trained = reduce(lambda a, b: a.beside(b, num_gpus), others) if others else nothing
    scoring_s = _least_slowest_s(scoring, 1, num_gpus)
    least_s, at = np.inf, (0, 0)
    rows = max(1, _CELLS // max(1, len(trained)))
    for start in range(0, len(acting), rows):
        block = slice(start, start + rows)
        step_s = _table_s(acting, block, trained, scoring_s)
        cell = int(step_s.argmin()) if step_s.size else 0
        if step_s.size and step_s.flat[cell] < least_s:
            row, column = divmod(cell, len(trained))
            least_s, at = float(step_s.flat[cell]), (start + row, column)
    if least_s == np.inf:
        return None
    left = num_gpus - acting.num_gpus[at[0]] - trained.num_gpus[at[1]]
    within_s = scoring_s[left : left + 1]
    chosen = acting.choices[at[0]] + trained.choices[at[1]]
    for curve in scoring:
        chosen += curve.choices[int(curve.first_within(1, within_s)[0])]
    return Division(step_s=least_s, choices=chosen)


def _table_s(acting: Curve, block: slice, trained: Curve, scoring_s: np.ndarray) -> np.ndarray:
    left = len(scoring_s) - 1 - acting.num_gpus[block, None] - trained.num_gpus[None, :]
    slowest = np.maximum(acting.stage_s[block, None, :], trained.stage_s[None, :, :])
    prepare_s = np.maximum(slowest[:, :, 1], scoring_s[np.maximum(left, 0)])
    return np.where(left >= 0, slowest[:, :, 0] + prepare_s + slowest[:, :, 2], np.inf)


def _least_slowest_s(curves: Sequence[Curve], stage: int, num_gpus: int) -> np.ndarray:
    """[num_gpus + 1] seconds of the slowest set on each number of GPUs divided best for a stage."""
    if not curves:
        return np.zeros(num_gpus + 1)
    times_s = np.unique(np.concatenate([curve.stage_s[:, stage] for curve in curves]))
    needed = np.zeros(len(times_s))
    for curve in curves:
        # The last entry stands for a time within which no way is.
        sizes = np.append(curve.num_gpus.astype(np.float64), np.inf)
        needed += sizes[curve.first_within(stage, times_s)]
    # The longer the time, the fewer GPUs: the first time whose need can be met is the least.
    first = np.searchsorted(-needed, -np.arange(num_gpus + 1, dtype=np.float64))
    return np.append(times_s, np.inf)[first]
