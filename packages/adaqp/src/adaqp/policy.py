"""Message policies: exact, one width, widths chosen from the data, one step late, or none.

A policy is a plain record of settings, which `adaqp.messages.runtime` executes. `Adaptive` is
AdaQP's method (arXiv 2306.01381), `Stale` is PipeGCN's (arXiv 2203.10428), for comparison.
"""

from dataclasses import dataclass
from typing import ClassVar

from adaqp.planner.solvers import SCOPES, SOLVERS
from adaqp.planner.widths import AS_IS, DROPPED, WIDTHS
from shared.errors import ConfigError

__all__ = ["Adaptive", "Drop", "Exact", "Fixed", "Policy", "Stale"]


@dataclass(frozen=True, slots=True)
class Policy:
    """Base class of policies; those that choose widths in training derive from `Adaptive`.

    Attributes:
        is_late: whether a step uses the rows and gradients of the step before.
    """

    is_late: ClassVar[bool] = False

    @property
    def start_bits(self) -> int:
        """Width of all rows before any assignment: one of `WIDTHS`, or `DROPPED`."""
        return AS_IS


@dataclass(frozen=True, slots=True)
class Exact(Policy):
    """Every row in its own dtype."""


@dataclass(frozen=True, slots=True)
class Drop(Policy):
    """Nothing is sent and remote neighbours count as zeros: the control for accuracy claims."""

    @property
    def start_bits(self) -> int:
        """Nothing is sent."""
        return DROPPED


@dataclass(frozen=True, slots=True)
class Stale(Policy):
    """Exact rows and gradients of the step before, so that sending overlaps with a whole step.

    The first step waits for its own messages. Gradients are biased, as in PipeGCN.
    """

    is_late: ClassVar[bool] = True


@dataclass(frozen=True, slots=True)
class Fixed(Policy):
    """Every row at `bits` bits: 1, 2, 4, 8 (stochastic rounding), 16 (bfloat16) or 32 (as is).

    Args:
        bits: one of `adaqp.planner.widths.WIDTHS`.

    Raises:
        ConfigError: an unknown width.
    """

    bits: int

    def __post_init__(self) -> None:
        if self.bits not in WIDTHS:
            raise ConfigError(f"Fixed.bits: expected one of {WIDTHS.names()}, got {self.bits!r}")

    @property
    def start_bits(self) -> int:
        """Width of all rows."""
        return self.bits


@dataclass(frozen=True, slots=True)
class Adaptive(Policy):
    """Widths chosen for groups of rows by weighing transfer time against variance.

    Args:
        bits: widths to choose from, ascending.
        lam: weight of the variance against the time, 0 (only time) to 1 (only variance).
        every: steps between assignments.
        solver: "greedy" (proven gap, milliseconds) or "milp" (HiGHS).
        scope: "layer" solves one problem per layer and direction, "global" one over all of them.
        group_size: rows that share a width.
        first_bits: width of all rows before the first assignment.
        first_at: step of the first assignment, in addition to the multiples of `every`; the
            ranges of rows settle within a few steps.
        overlap_aware: count transfer time that overlaps with local aggregation as free.
        decay: weight of the moving average against the squared ranges of a new step, in [0, 1).

    Raises:
        ConfigError: a value outside its range.
    """

    bits: tuple[int, ...] = (2, 4, 8)
    lam: float = 0.5
    every: int = 50
    solver: str = "greedy"
    scope: str = "layer"
    group_size: int = 100
    first_bits: int = 4
    first_at: int = 5
    overlap_aware: bool = False
    decay: float = 0.9

    def __post_init__(self) -> None:
        bad = [b for b in self.bits if b not in WIDTHS]
        if not self.bits or bad or list(self.bits) != sorted(set(self.bits)):
            raise ConfigError(
                f"Adaptive.bits: expected ascending widths out of {WIDTHS.names()}, got {self.bits!r}"
            )
        if self.first_bits not in WIDTHS:
            raise ConfigError(
                f"Adaptive.first_bits: expected one of {WIDTHS.names()}, got {self.first_bits!r}"
            )
        if not 0 <= self.lam <= 1:
            raise ConfigError(f"Adaptive.lam: expected a number in [0, 1], got {self.lam!r}")
        if not 0 <= self.decay < 1:
            raise ConfigError(f"Adaptive.decay: expected a number in [0, 1), got {self.decay!r}")
        for name in ("every", "group_size", "first_at"):
            if getattr(self, name) < 1:
                raise ConfigError(
                    f"Adaptive.{name}: expected 1 or more, got {getattr(self, name)!r}"
                )
        SOLVERS.check(self.solver)
        SCOPES.check(self.scope)

    @property
    def start_bits(self) -> int:
        """Width before the first assignment."""
        return self.first_bits
