"""`bytecheckpoint demo`: training is killed, and resumed on other ranks with the same losses.

A small Transformer learns English text on two ranks, saving every few steps in the background.
All ranks are killed in the middle. Training resumes from the newest checkpoint, in one process and on
four ranks, and each step's loss is compared with that of an uninterrupted run. The demo also measures
how long a save blocks training, ours and torch DCP's in turn.
"""

from __future__ import annotations

import tempfile
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from statistics import median

from bytecheckpoint.demo import training
from shared.claims import Claim, finish, pair_turns
from shared.comms import RankPool
from shared.errors import RankFailure
from shared.training.pictures import new_picture, save_picture
from shared.training.progress import show_progress

__all__ = ["run"]

_SOURCE = "bytecheckpoint demo"
_TIMEOUT = timedelta(minutes=10)
# Sums of floats in another order differ in the last digits, and training magnifies that.
_TOLERANCE = 2e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class _Size:
    """How much of everything a form of the demo does."""

    num_layers: int
    num_steps: int
    every_n: int
    kill_at: int
    rounds: int


_SHORT = _Size(num_layers=2, num_steps=16, every_n=4, kill_at=10, rounds=5)
_FULL = _Size(num_layers=8, num_steps=120, every_n=20, kill_at=70, rounds=9)


def run(out: Path, *, is_full: bool) -> bool:
    """Runs the demo and writes demo.json and a figure to `out`.

    Returns:
        Whether every claim's result was correct.
    """
    size = _FULL if is_full else _SHORT
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        saved = folder / "run"
        with RankPool(2, timeout=_TIMEOUT) as pool:
            with show_progress("bytecheckpoint: training on two ranks, undisturbed"):
                whole = pool.run(training.train, size.num_layers, size.num_steps).results[0][1]
            with show_progress("bytecheckpoint: saving, ours and DCP's in turn"):
                args = (size.num_layers, folder, size.rounds)
                blocked = pool.run(training.measure_blocking, *args).results[0]
            with (
                show_progress("bytecheckpoint: training until every rank is killed"),
                suppress(RankFailure),
            ):
                args = (size.num_layers, saved, size.every_n, size.kill_at)
                pool.run(training.train_until_killed, *args)
        with show_progress("bytecheckpoint: resuming in one process"):
            alone = training.train(size.num_layers, size.num_steps, saved)
        with (
            show_progress("bytecheckpoint: resuming on four ranks"),
            RankPool(4, timeout=_TIMEOUT) as pool,
        ):
            four = pool.run(training.train, size.num_layers, size.num_steps, saved).results[0]
            read = pool.run(training.measure_read_bytes, size.num_layers, saved).results[0]
    claims = [
        _claim_resumption("one process", whole, alone, size),
        _claim_resumption("four ranks", whole, four, size),
        *_claim_blocking(blocked, size),
        _claim_reads(read),
    ]
    figures = {
        "whole": whole,
        "one process": {"first": alone[0], "losses": alone[1]},
        "four ranks": {"first": four[0], "losses": four[1]},
        "blocked": blocked,
        "read": read,
    }
    _draw(whole, alone, four, blocked, size, out / "resumed.svg")
    return finish(out, "bytecheckpoint", claims, figures)


def _claim_resumption(
    where: str, whole: list[float], found: tuple[int, list[float]], size: _Size
) -> Claim:
    first, losses = found
    expected = whole[first:]
    furthest = max((abs(a - b) for a, b in zip(losses, expected, strict=False)), default=1.0)
    newest = size.kill_at // size.every_n * size.every_n
    return Claim(
        name=f"killed on two ranks, gone on in {where}: last step's loss",
        unit="nats",
        ours=losses[-1],
        baseline=whole[-1],
        baseline_name="the same run, not killed",
        higher_is_better=False,
        correct=furthest <= _TOLERANCE
        and len(losses) == len(expected)
        and first in (newest, newest - size.every_n),
        detail=f"killed at step {size.kill_at}, resumed from step {first}; losses of all later "
        f"steps within {furthest:.1e}, at most {_TOLERANCE:g} allowed",
        source=_SOURCE,
    )


def _claim_blocking(found: dict[str, list[float]], size: _Size) -> list[Claim]:
    claims = []
    for name, ours, theirs, baseline in (
        ("training blocked by a save", "ours", "dcp", "torch DCP, async_save"),
        ("a save until it is safe", "ours total", "dcp total", "torch DCP, async_save"),
    ):
        claims.append(
            Claim(
                name=name,
                unit="s",
                **pair_turns(found[ours], found[theirs]),
                baseline_name=baseline,
                correct=found["correct"] == [1.0],
                detail=f"FSDP2 model and AdamW state on 2 ranks, median of {size.rounds} in turn, "
                f"slowest rank; what was stored equals the weights",
                source=_SOURCE,
            )
        )
    return claims


def _claim_reads(found: dict[str, int]) -> Claim:
    return Claim(
        name="four ranks load the whole model: bytes read from storage",
        unit="MB",
        ours=found["always"] / 1e6,
        baseline=found["never"] / 1e6,
        baseline_name="each rank reads for itself",
        higher_is_better=False,
        correct=found["always"] <= 1.25 * found["model"],
        detail="dedupe='always' against 'never'; the model has "
        f"{found['model'] / 1e6:.2f} MB, whole checksum blocks are read",
        source=_SOURCE,
    )


def _draw(
    whole: list[float],
    alone: tuple[int, list[float]],
    four: tuple[int, list[float]],
    blocked: dict[str, list[float]],
    size: _Size,
    path: Path,
) -> None:
    figure = new_picture(5.2)
    left, right = figure.subplots(2, 1, height_ratios=[3, 2])
    steps = range(1, len(whole) + 1)
    left.plot(steps, whole, color="#999999", linewidth=6, alpha=0.5, label="2 ranks, not killed")
    for (first, losses), label, colour, style in (
        (alone, "resumed in 1 process", "#0072B2", "-"),
        (four, "resumed on 4 ranks", "#D55E00", "--"),
    ):
        left.plot(
            range(first + 1, first + 1 + len(losses)), losses, style, color=colour, label=label
        )
    left.axvline(size.kill_at, color="black", linestyle=":")
    left.text(size.kill_at, left.get_ylim()[1], " killed", va="top")
    left.set_xlabel("step")
    left.set_ylabel("loss, nats a byte")
    left.legend()
    names = ["blocked", "until safe"]
    ours = [1e3 * median(blocked[key]) for key in ("ours", "ours total")]
    theirs = [1e3 * median(blocked[key]) for key in ("dcp", "dcp total")]
    for shift, heights, label, colour in (
        (-0.2, ours, "bytecheckpoint", "#0072B2"),
        (0.2, theirs, "torch DCP async_save", "#E69F00"),
    ):
        places = [at + shift for at in range(2)]
        right.bar(places, heights, width=0.38, label=label, color=colour)
        for place, height in zip(places, heights, strict=True):
            right.text(place, height, f"{height:.0f}", ha="center", va="bottom")
    right.set_xticks(range(2), names)
    right.set_ylabel("ms a save, median")
    right.margins(y=0.2)
    right.legend()
    title = "A small Transformer, saved every few steps, killed and resumed; what a save takes"
    save_picture(figure, path, title)
