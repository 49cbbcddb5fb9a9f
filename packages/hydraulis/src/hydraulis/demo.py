"""The demo: Python's own source files over 16 ranks, planned here and by published ways."""

import time
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from hydraulis.config import Cost, Replica
from hydraulis.data import python_source
from hydraulis.planner.baselines import best_fit_decreasing, random_greedy
from hydraulis.planner.dispatch import dispatch, makespan_s
from shared.claims import Claim, finish

__all__ = ["make_claims", "run"]

RANKS, CAP = 16, 65_536
COST = Cost(a=5.128e-9, b=1.8396e-4)
"""Seconds of a 7-billion-weight model on a GPU (FlexSP's published constants)."""


def run(out: Path, *, is_full: bool) -> bool:
    """Runs the demo and writes demo.json and a picture to `out`.

    Returns:
        Whether every claim's result was correct.
    """
    out.mkdir(parents=True, exist_ok=True)
    sizes = [len(text) for text in python_source()]
    lengths = np.array([size for size in sizes if size <= CAP])
    claims, loads = make_claims(lengths, repeats=7 if is_full else 3)
    _draw(loads, out / "ranks.svg")
    return finish(
        out, "hydraulis", claims, {"seconds": {name: one.tolist() for name, one in loads.items()}}
    )


def make_claims(lengths: np.ndarray, *, repeats: int) -> tuple[list[Claim], dict[str, np.ndarray]]:
    """Claims on documents of these lengths, and seconds of each rank by way."""
    replicas = [Replica(cost=COST, cap=CAP)] * RANKS
    dispatch(lengths[:50], replicas)  # compiles
    ours_s, theirs_s = [], []
    for _ in range(repeats):
        begun = time.perf_counter()
        ours = dispatch(lengths, replicas)
        middle = time.perf_counter()
        theirs = random_greedy(lengths, replicas, trials=10)
        theirs_s.append(10 * (time.perf_counter() - middle))
        ours_s.append(middle - begun)
    rows = best_fit_decreasing(lengths.tolist(), CAP)
    packed = np.empty(len(lengths), dtype=np.int64)
    for number, row in enumerate(rows):
        packed[row] = number % RANKS
    placed = {"packed to equal tokens": packed, "random greedy": theirs, "planned": ours.replica_of}
    loads = {
        name: np.bincount(way, COST.sequence_s(lengths), RANKS) for name, way in placed.items()
    }
    is_whole = len(ours.replica_of) == len(lengths) and set(ours.replica_of) == set(range(RANKS))
    is_right = is_whole and ours.bound_s <= ours.makespan_s <= 1.01 * ours.bound_s
    greedy_s = makespan_s(lengths, replicas, theirs)
    text = f"{len(lengths)} files of Python's library as bytes, {RANKS} ranks"
    return [
        Claim(
            name="seconds to plan a step", unit="s", ours=float(np.median(ours_s)),
            baseline=float(np.median(theirs_s)), baseline_name="the published greedy, 100 trials",
            higher_is_better=False, correct=is_right and ours.makespan_s <= greedy_s,
            detail=f"{text}; 10 of its 100 trials timed; ours is within {ours.gap:.2%} of the bound",
            source="hydraulis demo",
        ),
        Claim(
            name="seconds of a step, by the cost model", unit="s", ours=ours.makespan_s,
            baseline=float(loads["packed to equal tokens"].max()),
            baseline_name="rows of equal tokens (best fit decreasing), dealt in turn",
            higher_is_better=False, kind="simulated", correct=is_right,
            detail=f"{text}; a s^2 + b s of a 7-billion-weight model (FlexSP's constants)",
            source="hydraulis demo",
        ),
        Claim(
            name="seconds of the same step against the greedy's", unit="s", ours=ours.makespan_s,
            baseline=greedy_s, baseline_name="the published greedy, 10 trials",
            higher_is_better=False, kind="simulated",
            correct=is_right and ours.makespan_s <= greedy_s, detail=text, source="hydraulis demo",
        ),
    ], loads  # fmt: skip


def _draw(loads: dict[str, np.ndarray], path: Path) -> None:
    figure = Figure(figsize=(8, 2.6), layout="constrained")
    panels = figure.subplots(1, len(loads), sharey=True)
    for axes, (name, seconds) in zip(panels, loads.items(), strict=True):
        axes.bar(range(len(seconds)), seconds, color="#0b7285")
        axes.axhline(seconds.mean(), color="#e8590c", linewidth=1)
        axes.set(title=f"{name}: {seconds.max():.0f} s", xlabel="rank")
    panels[0].set_ylabel("seconds of a step")
    figure.savefig(path)
