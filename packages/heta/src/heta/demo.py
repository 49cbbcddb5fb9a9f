"""`heta demo`: flights of 2013 on two ranks, by each strategy in turns, beside one process.

All begin with the same values, see the same batches and draw the same edges, so that losses should be
those of one process. With root the ranks are hosts of their own behind real links (network
namespaces); without, they share this machine's loopback, and no claim about seconds is made.
"""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from heta.config import TrainConfig
from heta.data.nycflights import flights
from heta.training.jobs.comparison import StrategyComparison, compare_strategies
from shared.claims import Claim, finish, pair_turns
from shared.comms import netlab
from shared.training.pictures import new_picture, save_picture
from shared.training.progress import show_progress

__all__ = ["FULL", "SHORT", "Size", "claim", "compare", "run"]

_RATE = "100mbit"
_SOURCE = "heta demo"
# Largest relative difference of a loss, of bytes from the plan's, and difference of AUROC.
_LOSS_BOUND, _BYTES_BOUND, _AUC_BOUND = 1e-5, 0.02, 0.003


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How much the demo does.

    Attributes:
        days: days of the year, evenly spread.
        batch_size: seeds of a step.
        hidden: width of layers.
        turns: timed turns of each strategy; one more warms up.
        steps_per_turn: steps in a turn.
    """

    days: int
    batch_size: int
    hidden: int
    turns: int
    steps_per_turn: int


SHORT = Size(days=60, batch_size=1024, hidden=64, turns=3, steps_per_turn=4)
FULL = Size(days=365, batch_size=2048, hidden=64, turns=7, steps_per_turn=10)


def run(out: Path, *, is_full: bool) -> bool:
    """Runs the demo and writes demo.json and a picture to `out`.

    Returns:
        Whether every claim's result was correct.
    """
    size = FULL if is_full else SHORT
    unavailable = netlab.available()
    where = "loopback" if unavailable else f"{_RATE} links"
    if unavailable:
        # The tour repeats lines that begin so.
        sys.stdout.write(f"skipped: seconds over {_RATE} links: {unavailable}\n")
    out.mkdir(parents=True, exist_ok=True)
    comparison = compare(size, None if unavailable else _RATE)
    title = f"A step of {size.batch_size:,} flights on two hosts by strategy, {where}"
    _draw(comparison, title, out / "strategies.svg")
    figures = {
        "timings": {name: asdict(timing) for name, timing in comparison.timings.items()},
        "alone": asdict(comparison.alone),
        "predicted": {
            name: {"step_s": each.step_s, "sent_bytes": each.sent_bytes}
            for name, each in comparison.plans.items()
        },
    }
    claims = claim(comparison, size, is_networked=not unavailable)
    return finish(out, "heta", claims, figures)


def compare(size: Size, rate: str | None) -> StrategyComparison:
    """Trains flights by each strategy on two ranks, and in one process.

    Args:
        size: how much.
        rate: of emulated links between the ranks, as "100mbit"; None: this machine's loopback.
    """
    with show_progress("heta: reading the flights"):
        graph = flights("late15", days=size.days)
    settings = {
        "batch_size": size.batch_size,
        "hidden": size.hidden,
        "uses_dst": False,
        "head_dim": graph.num_classes,
    }
    return compare_strategies(
        graph,
        TrainConfig(),
        2,
        settings,
        turns=size.turns,
        steps_per_turn=size.steps_per_turn,
        rate=rate,
    )


def claim(comparison: StrategyComparison, size: Size, *, is_networked: bool) -> list[Claim]:
    """Makes the demo's claims.

    Args:
        comparison: what was measured.
        size: how much.
        is_networked: whether links were emulated, without which seconds say little.
    """
    timings, alone = comparison.timings, comparison.alone
    raf, edge_cut = timings["raf"], timings["edge-cut"]
    errors = {name: _worst(timing.losses, alone.losses) for name, timing in timings.items()}
    equal = f"largest relative difference of a loss from one process's {max(errors.values()):.1e}"
    common: dict[str, Any] = {
        "correct": max(errors.values()) <= _LOSS_BOUND,
        "detail": f"flights of {size.days} days, R-GCN without own rows, {size.batch_size:,} seeds "
        f"a step; {equal}, at most {_LOSS_BOUND:.0e}",
        "source": _SOURCE,
    }
    predicted = comparison.plans["raf"].sent_bytes
    claims = [
        Claim(
            name="loss after training on two hosts",
            unit="nats",
            ours=raf.losses[-1],
            baseline=alone.losses[-1],
            baseline_name="one process",
            higher_is_better=False,
            **common,
        ),
        Claim(
            name="bytes sent in a step",
            unit="MB",
            ours=raf.sent_bytes / 1e6,
            baseline=edge_cut.sent_bytes / 1e6,
            baseline_name="edge-cut, same code",
            higher_is_better=False,
            **common,
        ),
        Claim(
            name="bytes sent in a step beside the plan's",
            unit="MB",
            ours=raf.sent_bytes / 1e6,
            baseline=predicted / 1e6,
            baseline_name="predicted before the run",
            higher_is_better=False,
            **common
            | {
                "correct": abs(raf.sent_bytes / predicted - 1) <= _BYTES_BOUND,
                "detail": f"{abs(raf.sent_bytes / predicted - 1):.2%} apart, at most "
                f"{_BYTES_BOUND:.0%}",
            },
        ),
    ]
    if raf.auc is not None and alone.auc is not None:
        claims.append(
            Claim(
                name="AUROC on validation",
                unit="share",
                ours=raf.auc,
                baseline=alone.auc,
                baseline_name="one process",
                higher_is_better=True,
                **common | {"correct": abs(raf.auc - alone.auc) <= _AUC_BOUND},
            )
        )
    rivals = ("edge-cut", "replicate") if is_networked else ()
    claims += [
        Claim(
            name=f"seconds of a step over {_RATE} links, against {name}",
            unit="s",
            baseline_name=f"{name}, same code",
            **pair_turns(raf.step_s, timings[name].step_s),
            **common,
        )
        for name in rivals
    ]
    return claims


def _worst(losses: list[float], wanted: list[float]) -> float:
    """The largest relative difference."""
    return max(abs(a - b) / abs(b) for a, b in zip(losses, wanted, strict=True))


def _draw(comparison: StrategyComparison, title: str, path: Path) -> None:
    """Bars of bytes and seconds by strategy, predicted beside measured."""
    names = list(comparison.timings)
    figure = new_picture(4.6)
    panels = figure.subplots(2, 1)
    rows = (
        (
            "MB sent",
            [comparison.timings[name].sent_bytes / 1e6 for name in names],
            [comparison.plans[name].sent_bytes / 1e6 for name in names],
        ),
        (
            "milliseconds",
            [comparison.timings[name].median_s * 1e3 for name in names],
            [comparison.plans[name].step_s * 1e3 for name in names],
        ),
    )
    for axes, (label, measured, predicted) in zip(panels, rows, strict=True):
        positions = range(len(names))
        for shift, values, color, legend in (
            (-0.2, measured, "#0b7285", "measured"),
            (0.2, predicted, "#99d5df", "predicted"),
        ):
            bars = axes.bar([p + shift for p in positions], values, 0.38, color=color, label=legend)
            axes.bar_label(bars, fmt="{:.3g}")
        axes.set_xticks(list(positions), names)
        axes.set(ylabel=label)
        axes.margins(y=0.18)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].legend(frameon=False)
    save_picture(figure, path, title)
