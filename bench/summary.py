"""The page's summary: every claim's ratio to its baseline, sorted into kinds, an axis for each."""

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass

from history import format_number
from shared.claims import Claim

__all__ = ["KINDS", "Axis", "claim_ratio_text", "figures_text", "kind_of", "ratio_text", "summary"]

# By the kind's name, what its ratios count.
KINDS = {
    "time": "how many times sooner, or how many times as much a second",
    "bytes": "how many times fewer",
    "accuracy": "how many times better: shares, losses and scores, where 1 is often the aim",
}
_SECONDS = {"h": 3600.0, "min": 60.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
_BYTES = {"TB": 1e12, "GB": 1e9, "MB": 1e6, "kB": 1e3, "B": 1.0}
_OTHER_BYTES = {"bytes", "KB", "TiB", "GiB", "MiB", "KiB"}


def kind_of(unit: str) -> str:
    """Returns which of `KINDS` a claim in this unit is of."""
    first = unit.partition(" ")[0]
    if first in _SECONDS or unit.endswith("/s"):
        return "time"
    return "bytes" if first in _BYTES or first in _OTHER_BYTES else "accuracy"


def figures_text(claim: Claim) -> tuple[str, str]:
    """Writes both figures of a claim with three significant digits, in one unit that suits them."""
    ours, baseline, unit = claim.ours, claim.baseline, claim.unit
    first, space, rest = unit.partition(" ")
    for scale in (_SECONDS, _BYTES):
        largest = max(abs(ours), abs(baseline)) * scale.get(first, 0.0)
        if 0 < largest < math.inf:
            small = list(scale)[-1]
            fitting = next((name for name in scale if scale[name] <= largest), small)
            factor = scale[first] / scale[fitting]
            ours, baseline, unit = ours * factor, baseline * factor, fitting + space + rest
    texts = [f"{format_number(value)} {unit}".rstrip() for value in (ours, baseline)]
    return texts[0], texts[1]


def ratio_text(ratio: float) -> str:
    """Writes a ratio with three significant digits."""
    return f"{format_number(ratio)}x" if math.isfinite(ratio) else "not finite"


def claim_ratio_text(claim: Claim) -> str:
    """Writes a claim's ratio, with its range if the turns that it comes from disagree."""
    if claim.disputed_range is None:
        return ratio_text(claim.ratio)
    low, high = claim.disputed_range
    return f"{ratio_text(claim.ratio)} ({format_number(low)}-{format_number(high)})"


@dataclass(frozen=True, slots=True)
class Axis:
    """A logarithmic axis of ratios, with 1 on it.

    Attributes:
        ticks: where it is labelled, ascending; the first and the last are its ends.
    """

    ticks: tuple[float, ...]

    @classmethod
    def around(cls, ratios: Sequence[float]) -> "Axis":
        """Returns the shortest axis whose ends are ticks and that holds all ratios."""
        finite = [1.0, *(ratio for ratio in ratios if 0 < ratio < math.inf)]
        first, last = (math.floor(math.log10(end)) for end in (min(finite), max(finite)))
        exponents = range(first - 1, last + 2)  # logarithms are rounded
        for digits in ((1, 2, 5), (1,)):
            series = [digit * 10.0**exponent for exponent in exponents for digit in digits]
            low = max(tick for tick in series if tick <= min(finite))
            high = min(tick for tick in series if tick >= max(*finite, 2.0))
            ticks = tuple(tick for tick in series if low <= tick <= high)
            if len(ticks) <= 8:
                break
        return cls(ticks)

    def percent(self, ratio: float) -> float:
        """Returns where a ratio lies, from 0 at the left end to 100 at the right one."""
        low, high = math.log(self.ticks[0]), math.log(self.ticks[-1])
        return 100 * (math.log(ratio) - low) / (high - low)


def summary(claims: Sequence[tuple[str, Claim]]) -> str:
    """Returns the summary as HTML.

    Args:
        claims: each with the package that makes it.
    """
    parts = [
        "<p><strong>A higher ratio is better; above 1 ours is better than the baseline.</strong></p>"
    ]
    for kind, about in KINDS.items():
        mine = [(package, claim) for package, claim in claims if kind_of(claim.unit) == kind]
        if mine:
            axis = Axis.around([claim.ratio for _, claim in mine])
            ticks = "".join(
                f'<i style="left:{axis.percent(tick):.2f}%">{tick:g}</i>' for tick in axis.ticks
            )
            labels = f'<li aria-hidden="true"><span class="ticks">{ticks}</span></li>'
            parts.append(
                f'<h3>{kind.capitalize()}</h3><p class="note">Ratio to the baseline: {about}.</p>'
                f'<ol class="bars">{labels}{"".join(_row(package, claim, axis) for package, claim in mine)}'
                f"{labels}</ol>"
            )
    return f'<div class="summary">{"".join(parts)}</div>'


def _row(package: str, claim: Claim, axis: Axis) -> str:
    lines = "".join(
        f'<i class="{"one" if tick == 1 else ""}" style="left:{axis.percent(tick):.2f}%"></i>'
        for tick in axis.ticks
    )
    bar = ""
    if 0 < claim.ratio < math.inf:
        start, end = sorted((axis.percent(1.0), axis.percent(claim.ratio)))
        look = "modelled" if claim.kind == "simulated" else ""
        look = look if claim.correct else "wrong"
        bar = f'<b class="{look}" style="left:{start:.2f}%;width:{end - start:.2f}%"></b>'
    simulated = ' <span class="simulated">simulated</span>' if claim.kind == "simulated" else ""
    return (
        f'<li><span class="label"><a href="#{html.escape(package)}">{html.escape(package)}</a> '
        f"{html.escape(claim.name)}{simulated} "
        f'<span class="detail">against {html.escape(claim.baseline_name)}</span></span>'
        f'<span class="track" aria-hidden="true">{lines}{bar}</span>'
        f'<span class="number">{claim_ratio_text(claim)}</span></li>'
    )
