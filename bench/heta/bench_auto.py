"""What `auto` chooses beside what is fastest, and predicted steps beside measured ones.

R-GCN of two layers, 64 wide, fan-outs 10 and 10, 2,048 seeds a step over all hosts; one rank and one
thread a host. Rates of work and the link are measured first, and plans are made for them; then the
strategies take turns of ten steps, or three. Four hosts share two cores, so that predictions say little there.
"""

from itertools import product
from statistics import median

import pytest

import heta
from heta.config import TrainConfig
from heta.training.jobs.comparison import compare_strategies
from shared.claims import Claim
from shared.comms import netlab

pytestmark = [
    pytest.mark.netns,
    pytest.mark.skipif(netlab.available() is not None, reason=str(netlab.available())),
]

PEERS = [
    {
        "peer": "the fastest other strategy",
        "setting": "the same kernels, seeds and draws; the strategy that `auto` did not choose and that "
        "took the least median",
        "why": "a plan is worth as much as what it chooses is faster",
    }
]
TURNS, STEPS_A_TURN = 7, {"flights": 10, "mag_like": 3}
COMPARED = 24
"""First steps whose losses are compared: training magnifies rounding."""
GRAPHS = {
    "flights": lambda: heta.data.flights("late15"),
    "mag_like": lambda: heta.data.mag_like(0.2),
}
CASES = [
    *product(GRAPHS, ("100mbit", "1gbit"), (False, True), (2,)),
    *product(GRAPHS, ("100mbit",), (False,), (4,)),
]
ERRORS: list[float] = []
"""Of predicted steps on two hosts, over all cases."""


@pytest.mark.parametrize(("name", "rate", "uses_dst", "hosts"), CASES)
def bench_auto(benchmark, record_claim, name, rate, uses_dst, hosts):
    graph = GRAPHS[name]()
    settings = {"uses_dst": uses_dst, "head_dim": graph.num_classes}
    compared = benchmark.pedantic(
        lambda: compare_strategies(
            graph, TrainConfig(), hosts, settings,
            turns=TURNS, steps_per_turn=STEPS_A_TURN[name], rate=rate,
        ),
        rounds=1,
    )  # fmt: skip
    timings, plans = compared.timings, compared.plans
    chosen = min(plans, key=lambda strategy: plans[strategy].step_s)
    errors = {s: abs(plans[s].step_s / timings[s].median_s - 1) for s in plans}
    for strategy, timing in timings.items():
        benchmark.extra_info[strategy] = (
            f"{timing.median_s:.4f} s ({min(timing.step_s):.4f} - {max(timing.step_s):.4f}), predicted "
            f"{plans[strategy].step_s:.4f}; {timing.sent_bytes / 1e6:.2f} MB, predicted "
            f"{plans[strategy].sent_bytes / 1e6:.2f}"
        )
    worst = max(
        abs(a - b) / abs(b)
        for timing in timings.values()
        for a, b in zip(timing.losses[:COMPARED], compared.alone.losses[:COMPARED], strict=True)
    )
    own = "with self term" if uses_dst else "no self term"
    where = f"{name}, {own}, {hosts} hosts, {rate}"
    is_close = worst <= 2e-3

    def record(title, ours, baseline, aim=None):
        pairs = zip(timings[ours].step_s, timings[baseline].step_s, strict=True)
        ratios = [theirs / mine for mine, theirs in pairs]
        record_claim(
            Claim(
                name=f"{where}: {title}",
                unit="s a step",
                ours=timings[ours].median_s,
                baseline=timings[baseline].median_s,
                baseline_name=baseline,
                higher_is_better=False,
                correct=is_close and timings[ours].losses[0] > timings[ours].losses[-1],
                detail=f"losses within {worst:.1e} of one process's",
            ),
            aim=aim,
            spread=(min(ratios), max(ratios)),
        )

    rivals = [s for s in timings if s != chosen]
    fastest = min(rivals, key=lambda s: timings[s].median_s)
    record(f"auto ({chosen})", chosen, fastest, 1.0)
    for strategy in ("edge-cut", "replicate"):
        record("raf", "raf", strategy)
    if hosts == 2:
        ERRORS.extend(errors.values())
    if len(ERRORS) == 3 * sum(case[-1] == 2 for case in CASES):
        record_claim(
            Claim(
                name=f"error of a predicted step, median of {len(ERRORS)}",
                unit="share of the measured",
                ours=median(ERRORS),
                baseline=0.1,
                baseline_name="what we aim at",
                higher_is_better=False,
                correct=max(ERRORS) > 0,
                detail=f"from {min(ERRORS):.1%} to {max(ERRORS):.1%}",
            ),
            aim=1.0,
        )
        ERRORS.clear()
