"""At least ten plans of one job, all run: the planner's choice beside the fastest, predictions beside steps.

Two ranks, a core each, on one machine and on two hosts at 100 Mbit/s. Plans of all placements and numbers of
micro-batches take turns on the same batches; of a plan's two steps in a turn the second is measured, as a run
of its own has its weights in caches. A step is the slower rank's. The choice is the plan of the shortest
prediction, or data parallelism where that is a few percent behind, made before anything runs.
"""

import sys
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from statistics import median

import pytest
import torch

import diffusionpipe as dp
from shared.claims import Claim
from shared.comms import NetLab, RankPool, netlab
from shared.comms.handicap import handicap
from shared.errors import ConfigError

sys.path.insert(0, str(Path(__file__).parent))

from small_sd import (
    Engine,
    build_job,
    fit_cluster,
    is_same_training,
    measure_profile,
    measure_untrained,
)
from turns import take_turns

BATCH, TURNS, FEWEST = 32, 15, 10
WANTED = [
    *(("data", 1, count) for count in (1, 2, 4)),
    *((placement, 2, count) for placement in ("chain", "folded") for count in (2, 4, 8, 16)),
]
"""Placement, stages and micro-batches of each plan."""
NETWORKS = {"local": None, "hosts": "100mbit"}
CHOICE, MEDIAN, LARGEST = 1.05, 8.0, 20.0
"""The choice's step over the fastest's; the median and the largest error of predictions, in percent."""
COMMAND = "hatch run bench diffusionpipe/plans"


def make_plans(job, profile, cluster):
    """The choice, and all plans by name."""
    choice = dp.plan(job, profile, cluster, batch_size=BATCH)
    plans = {}
    for placement, stages, count in WANTED:
        try:
            plan = dp.plan(
                job, profile, cluster, batch_size=BATCH, placement=placement, num_stages=stages,
                num_micro_batches=count,
            )  # fmt: skip
        except ConfigError:
            continue  # counted: there must be ten
        plans[f"{placement} {count}"] = plan
    name = f"{choice.placement} {choice.num_micro_batches}"
    plans.setdefault(name, choice)
    return name, plans


def run(has_hosts, num_turns):
    torch.set_num_threads(1)
    job = build_job()
    profile, cluster = measure_profile(job, BATCH), fit_cluster(has_hosts=has_hosts)
    chosen, plans = make_plans(job, profile, cluster)
    engines = {name: Engine(job, plan) for name, plan in plans.items()}
    turns = take_turns(engines, num_turns, num_warm=1, num_steps=2)
    untrained = measure_untrained(job, BATCH, num_turns)
    predicted = {name: plan.predicted_s for name, plan in plans.items()}
    return turns, predicted, chosen, untrained


@pytest.mark.parametrize("name", list(NETWORKS))
@pytest.mark.netns
def bench_plans(benchmark, record_claim, name):
    rate = NETWORKS[name]
    if rate and netlab.available():
        pytest.skip(str(netlab.available()))
    words = [handicap(cores=[0]), handicap(cores=[1])]
    limit = timedelta(minutes=15)
    with ExitStack() as stack:
        if rate:
            lab = stack.enter_context(NetLab(hosts=2, rate=rate))
            pool = stack.enter_context(lab.pool(handicaps=words, timeout=limit))
        else:
            pool = stack.enter_context(RankPool(2, prefix=words, timeout=limit))
        turns, predicted, chosen, untrained = benchmark.pedantic(
            lambda: pool.run(run, NETWORKS[name] is not None, TURNS).results[0], rounds=1
        )
    steps = {each: turns.seconds(each) for each in predicted}
    medians = {each: median(own) for each, own in steps.items()}
    fastest = min(medians, key=medians.__getitem__)
    reference = turns.losses["data 1"]
    is_right = len(predicted) >= FEWEST and all(
        is_same_training(turns.losses[each], reference, untrained) for each in predicted
    )
    rows = [
        f"{each} {predicted[each]:.3f} and {medians[each]:.3f} ({min(steps[each]):.3f} to "
        f"{max(steps[each]):.3f})"
        for each in sorted(medians, key=medians.__getitem__)
    ]
    told = f"batch {BATCH}; predicted and measured seconds, {TURNS} turns: {'; '.join(rows)}"
    source = f"{COMMAND} -k {name}"
    ratios = [a / b for a, b in zip(steps[chosen], steps[fastest], strict=True)]
    record_claim(
        Claim(
            name=f"step of the chosen plan, {name}", unit="s", ours=medians[chosen],
            baseline=medians[fastest], baseline_name="the fastest of all plans",
            higher_is_better=False, correct=is_right,
            detail=f"chosen: {chosen}, fastest: {fastest}; {told}", source=source,
        ),
        aim=round(1 / CHOICE, 3), spread=(1 / max(ratios), 1 / min(ratios)),
    )  # fmt: skip
    errors = [100 * abs(predicted[each] / medians[each] - 1) for each in predicted]
    for figure, value, aim in (
        ("median", median(errors), MEDIAN),
        ("largest", max(errors), LARGEST),
    ):
        record_claim(
            Claim(
                name=f"{figure} error of predicted steps, {name}", unit="%", ours=value,
                baseline=aim, baseline_name="the aim", higher_is_better=False,
                # Plans differ by more than the aim, so that one guess for all would not pass.
                correct=is_right and max(medians.values()) > 1.3 * min(medians.values()),
                ratio=aim / max(value, 0.01), detail=told, source=source,
            ),
            aim=1.0,
        )  # fmt: skip
