"""Seconds of a Llama's steps, predicted from a profile and measured, under thirteen plans.

The model is in float32, 8 layers, and trains on two sequences of 2,048 bytes of the Bible, each plan in a process
of its own (`contender.py`). Before the first step a layer, the head and the store are measured there, and
the plan is replayed; then steps are timed, forward and backward. The file is on a local disk.
"""

import sys
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parent))
from bench_memory import plans
from contender import Contender, Setting

from shared.claims import Claim
from shared.units import format_s

COMMAND = "hatch run bench memo/prediction"
AIM, STEPS = 0.08, 7
BASE = Setting(way="memo", num_layers=8, num_tokens=2048, is_predicted=True)
SIZES_MIB = (140, 180, 240, 300)


def measured(setting):
    """Seconds of steps as predicted, and as they came."""
    with Contender(setting) as one:
        for _ in range(STEPS + 1):
            one.step()
        assert one.plan is not None
        return one.plan.prediction["step_s"], one.seconds, len(set(one.losses)) == STEPS + 1


def bench_predicted_seconds(tmp_path, benchmark, record_claim):
    def measure():
        return {
            name: measured(setting) for name, setting in plans(tmp_path, BASE, SIZES_MIB).items()
        }

    found = benchmark.pedantic(measure, rounds=1)
    errors = [abs(told / median(seconds) - 1) for told, seconds, _ in found.values()]
    rows = "; ".join(
        f"{name}: {format_s(told)} predicted, {format_s(median(seconds))} measured "
        f"({format_s(min(seconds))} to {format_s(max(seconds))})"
        for name, (told, seconds, _) in found.items()
    )
    record_claim(
        Claim(
            name="largest error of a predicted step",
            unit="%",
            ours=100 * max(errors),
            baseline=100 * AIM,
            baseline_name="the aim",
            higher_is_better=False,
            correct=len(found) >= 12 and all(is_training for *_, is_training in found.values()),
            detail=f"median {100 * median(errors):.2g} % of {len(errors)} plans, {STEPS} steps each; {rows}",
            source=COMMAND,
        ),
        aim=1.0,
    )
