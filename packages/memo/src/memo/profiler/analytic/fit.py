"""What fits on a device and how long a step takes there, from 8K to 1M tokens: before anything runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from memo.config import Budget, DoesNotFit
from memo.planner.explanation import describe_layer
from memo.planner.layer_plan import LayerPlan, runs_of
from memo.planner.placement import fits, place
from memo.planner.plan import Plan
from memo.profiler.analytic.analysis import Analysis
from memo.simulator import simulate
from shared.units import format_bytes, format_s

__all__ = ["LENGTHS", "FitTable", "LengthFit", "fit"]

LENGTHS = tuple(1 << power for power in range(13, 21))
"""8K to 1M tokens, powers of two."""

_LONGEST = 1 << 26
_STEPS = 32
"""The longest length is found to a part in so many."""


@dataclass(frozen=True, slots=True)
class LengthFit:
    """One length.

    Attributes:
        num_tokens: of the sequence, on all ranks together.
        plan: the fastest that fits; None where none does.
        missing: why none does.
    """

    num_tokens: int
    plan: Plan | None
    missing: str = ""

    @property
    def tokens_per_s(self) -> float:
        """Tokens a second on all ranks together; 0 where nothing fits."""
        return 0.0 if self.plan is None else self.num_tokens / self.plan.prediction["step_s"]

    def to_json(self) -> dict[str, Any]:
        """What `memo fit --json` prints of a length."""
        if self.plan is None:
            return {"num_tokens": self.num_tokens, "fits": False, "missing": self.missing}
        names = ("step_s", "peak_bytes", "store_bytes", "exposed_s", "replayed_s", "kept_s")
        known = self.plan.prediction
        return {
            "num_tokens": self.num_tokens,
            "fits": True,
            "plan": describe(self.plan.layers),
            "has_block_loss": self.plan.has_block_loss,
            **{name: known[name] for name in (*names, "recomputed_s")},
            "tokens_per_s": self.tokens_per_s,
        }


@dataclass(frozen=True, slots=True)
class FitTable:
    """All lengths that were asked for.

    Attributes:
        rows: by length.
        longest: the longest length that fits, to a part in 32; 0 where none does.
    """

    rows: tuple[LengthFit, ...]
    longest: int

    @property
    def has_block_loss(self) -> bool:
        """Whether any plan computes its loss in blocks."""
        return any(row.plan is not None and row.plan.has_block_loss for row in self.rows)

    def to_json(self) -> dict[str, Any]:
        """What `memo fit --json` prints."""
        return {"rows": [row.to_json() for row in self.rows], "longest_tokens": self.longest}

    def table(self) -> str:
        """The rows as text."""
        cells = [
            ("tokens", "step", "tokens/s", "device", "store", "layers; the rest is computed again")
        ]
        for row in self.rows:
            if row.plan is None:
                cells.append((_tokens(row.num_tokens), "does not fit", "", "", "", ""))
                continue
            known = row.plan.prediction
            cells.append(
                (
                    _tokens(row.num_tokens),
                    format_s(known["step_s"]),
                    f"{row.tokens_per_s:,.0f}",
                    format_bytes(known["peak_bytes"]),
                    format_bytes(known["store_bytes"]),
                    describe(row.plan.layers),
                )
            )
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = [
            "  ".join(
                cell.ljust(width) if at == len(widths) - 1 else cell.rjust(width)
                for at, (cell, width) in enumerate(zip(line, widths, strict=True))
            ).rstrip()
            for line in cells
        ]
        return "\n".join(lines)


def fit(analysis: Analysis, budget: Budget, lengths: Sequence[int] = LENGTHS) -> FitTable:
    """Plans each length, and looks for the longest that fits.

    Args:
        analysis: the model on its devices.
        budget: of each of them.
        lengths: tokens of a sequence, multiples of the ranks.

    Raises:
        ConfigError: a length is none.
    """

    def row(num_tokens: int) -> LengthFit:
        missing = ""
        for has_tiles in (False, True):
            profile = analysis.profile(num_tokens, has_tiles=has_tiles)
            try:
                plan = place(profile, budget, budget.store_at or "pinned", predict=simulate)
            except DoesNotFit as error:
                missing = str(error)
            else:
                return LengthFit(num_tokens, plan)
        return LengthFit(num_tokens, None, missing)

    def is_possible(num_tokens: int) -> bool:
        return any(
            fits(analysis.profile(num_tokens, has_tiles=has_tiles), budget)
            for has_tiles in (False, True)
        )

    rows = tuple(row(one) for one in lengths)
    low = max((one.num_tokens for one in rows if one.plan is not None), default=0)
    unit = 16 * analysis.ranks
    high = max(2 * low, unit)
    while high <= _LONGEST and is_possible(high):
        low, high = high, 2 * high
    while high - low > max(unit, low // _STEPS):
        middle = (low + high) // 2 // unit * unit
        if is_possible(middle):
            low = middle
        else:
            high = middle
    return FitTable(rows, low)


def describe(layers: Sequence[LayerPlan]) -> str:
    """What becomes of layers, in one line, in the order of the forward."""
    return ", then ".join(f"{count} x {describe_layer(layer)}" for layer, count in runs_of(layers))


def _tokens(count: int) -> str:
    for unit, size in (("M", 1 << 20), ("K", 1 << 10)):
        if count % size == 0 and count >= size:
            return f"{count // size}{unit}"
    return f"{count:,}"
