"""What training steps took, beside what was planned."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

__all__ = ["StepRecord", "TrainingReport"]


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRecord:
    """One step on this rank.

    Attributes:
        planned_s: seconds until the last rank ends, by the cost that it was planned with.
        planned_busy_s: of them, seconds in which this rank computes.
        gap: share of the planned seconds by which the best plan may be shorter.
        busy_s: measured seconds until this rank's own gradients were complete.
        seconds: measured seconds of the step.
        is_late: whether it had to wait for its plan, see `StepLoader`.
    """

    planned_s: float
    planned_busy_s: float
    gap: float
    busy_s: float
    seconds: float
    is_late: bool = False


@dataclass(frozen=True, kw_only=True)
class TrainingReport:
    """All steps so far.

    Attributes:
        records: this rank's steps.
        idle_shares: by rank, the share of its steps after its own gradients were complete: waiting,
            the end of the exchange of gradients, and the update.
    """

    records: tuple[StepRecord, ...]
    idle_shares: tuple[float, ...]

    @property
    def num_planned_late(self) -> int:
        """Steps that had to wait for their plan."""
        return sum(one.is_late for one in self.records)

    def __str__(self) -> str:
        """A few lines for people."""
        if not self.records:
            return "no steps yet"
        # Costs may be in any unit: what can be told is how well one factor fits all steps.
        factors = [one.busy_s / one.planned_busy_s for one in self.records if one.planned_busy_s]
        lines = [
            f"{len(self.records)} steps, {median(one.seconds for one in self.records):.3g} s each",
            f"{self.num_planned_late} of them waited for their plan",
            f"planned within {max(one.gap for one in self.records):.2%} of the best there could be",
        ]
        if factors:
            typical = median(factors)
            errors = [abs(one / typical - 1) for one in factors]
            lines.append(
                f"seconds of this rank's steps off by {sum(errors) / len(errors):.1%} on average, at "
                f"{typical:.3g} of the planned ones"
            )
        lines += [f"rank {rank}: idle {share:.1%}" for rank, share in enumerate(self.idle_shares)]
        return "\n".join(lines)
