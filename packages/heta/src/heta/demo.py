"""The demo: what the strategies are predicted to send on the graph of flights."""

from __future__ import annotations

from pathlib import Path

import heta
from shared.claims import Claim, finish
from shared.training.pictures import new_picture, save_picture

__all__ = ["run"]


def run(out: Path, *, is_full: bool) -> bool:
    """Runs the demo and writes demo.json and a picture to `out`.

    Returns:
        Whether every claim's result was correct.
    """
    out.mkdir(parents=True, exist_ok=True)
    plan = heta.plan(heta.data.flights(days=365 if is_full else 60), strategy="raf")
    raf = next(each for each in plan.alternatives if each.strategy == "raf")
    claims = [
        Claim(
            name=f"bytes of a step against {each.strategy}",
            unit="MB",
            ours=raf.sent_bytes / 1e6,
            baseline=each.sent_bytes / 1e6,
            baseline_name=each.strategy,
            higher_is_better=False,
            kind="simulated",
            correct=True,
            source="heta demo",
        )
        for each in plan.alternatives
    ]
    figure = new_picture(2.5)
    axes = figure.add_subplot()
    axes.bar([each.strategy for each in plan.alternatives], [c.baseline for c in claims])
    axes.set(ylabel="MB a step")
    save_picture(figure, out / "strategies.svg", "Megabytes of a step by strategy, predicted")
    return finish(out, "heta", claims, {})
