"""The demo: prefix sums beside one `sum` a range, on the same ranges in the same process."""

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from hybridflow.sums import range_sums
from shared.claims import Claim, write_demo

__all__ = ["run_demo"]

_RANGES = (1_000, 4_000, 16_000)


def run_demo(out: Path, *, repeats: int = 5, seed: int = 0) -> list[Claim]:
    """Measures both ways, and writes `demo.json` and `times.svg`.

    Args:
        out: folder for the two files; made when missing.
        repeats: interleaved repeats, of which the median counts.
        seed: seed of the array and its ranges.

    Returns:
        One claim per number of ranges.
    """
    random = np.random.default_rng(seed)
    values = random.integers(-1000, 1000, 100_000)
    claims = []
    for num_ranges in _RANGES:
        bounds = np.sort(random.integers(0, len(values) + 1, (2, num_ranges)), axis=0)
        claims.append(_measure(values, bounds[0], bounds[1], repeats))
    out.mkdir(parents=True, exist_ok=True)
    _draw(claims, out / "times.svg")
    write_demo(out, "hybridflow", claims, {"ranges": list(_RANGES), "picture": "times.svg"})
    return claims


def _measure(values: np.ndarray, starts: np.ndarray, stops: np.ndarray, repeats: int) -> Claim:
    def plain() -> np.ndarray:
        return np.array([values[a:b].sum() for a, b in zip(starts, stops, strict=True)])

    ours, theirs, is_equal = [], [], True
    for _ in range(repeats):
        ours_s, mine = _timed(lambda: range_sums(values, starts, stops))
        plain_s, others = _timed(plain)
        ours.append(ours_s)
        theirs.append(plain_s)
        is_equal &= bool(np.array_equal(mine, others))
    return Claim(
        name=f"time for {len(starts):,} range sums",
        unit="s",
        ours=float(np.median(ours)),
        baseline=float(np.median(theirs)),
        baseline_name="one numpy sum a range",
        higher_is_better=False,
        correct=is_equal,
        detail="every sum equal to the baseline's",
        source="hybridflow demo",
    )


def _timed(call: Callable[[], np.ndarray]) -> tuple[float, np.ndarray]:
    started = time.perf_counter()
    result = call()
    return time.perf_counter() - started, result


def _draw(claims: list[Claim], path: Path) -> None:
    figure = Figure(figsize=(7, 3.2), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(_RANGES, [c.baseline * 1e3 for c in claims], "o-", color="#868e96", label="plain")
    axes.plot(_RANGES, [c.ours * 1e3 for c in claims], "o-", color="#0b7285", label="prefix sums")
    axes.set(xlabel="ranges", ylabel="time (ms)", yscale="log")
    axes.legend(frameon=False)
    figure.savefig(path)
