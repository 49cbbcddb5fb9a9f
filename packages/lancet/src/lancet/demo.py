"""The demo: prefix sums beside one `sum` a range, on the same ranges in the same process."""

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from lancet.summing.ranges import range_sums
from shared.claims import Claim, finish
from shared.training.pictures import new_picture, save_picture

__all__ = ["run"]

_RANGES = (1_000, 4_000, 16_000)


def run(out: Path, *, is_full: bool) -> bool:
    """Runs the demo and writes demo.json and a picture to `out`.

    Returns:
        Whether every claim's result was correct.
    """
    out.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(0)
    values = random.integers(-1000, 1000, 100_000)
    claims = []
    for num_ranges in _RANGES:
        bounds = np.sort(random.integers(0, len(values) + 1, (2, num_ranges)), axis=0)
        claims.append(_measure(values, bounds[0], bounds[1], 25 if is_full else 5))
    _draw(claims, out / "times.svg")
    return finish(out, "lancet", claims, {"ranges": list(_RANGES)})


def _measure(values: np.ndarray, starts: np.ndarray, stops: np.ndarray, repeats: int) -> Claim:
    ours, theirs, is_equal = [], [], True
    for _ in range(repeats):
        ours_s, mine = _timed(lambda: range_sums(values, starts, stops))
        plain_s, others = _timed(lambda: range_sums(values, starts, stops, method="loop"))
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
        source="lancet demo",
    )


def _timed(call: Callable[[], np.ndarray]) -> tuple[float, np.ndarray]:
    started = time.perf_counter()
    result = call()
    return time.perf_counter() - started, result


def _draw(claims: list[Claim], path: Path) -> None:
    figure = new_picture(3.0)
    axes = figure.add_subplot()
    axes.plot(_RANGES, [c.baseline * 1e3 for c in claims], "o-", color="#868e96", label="plain")
    axes.plot(_RANGES, [c.ours * 1e3 for c in claims], "o-", color="#0b7285", label="prefix sums")
    axes.set(xlabel="ranges", ylabel="time (ms)", yscale="log")
    axes.legend(frameon=False)
    save_picture(figure, path, "Milliseconds for ranges of sums, plain and by prefix sums")
