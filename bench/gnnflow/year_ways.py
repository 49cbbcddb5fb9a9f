"""The ways of learning from half a year of flights that `bench_year` sets side by side."""

import datetime
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor, nn

import gnnflow as gf
from gnnflow.data.negatives import Negatives
from gnnflow.training.link_task import LinkTask
from gnnflow.training.rounds import StageClock, cut_increments
from gnnflow.training.subnormal import flush_subnormals
from shared.kernels.philox import stream_key

DIM, CODE_DIM, FANOUT, BATCH, RATE = 32, 32, 10, 100, 3e-3
JANUARY_PASSES, WEEK_PASSES, REPLAY = 5, 4, 0.01
# Retraining takes as many passes as come next to this: more while there is little to learn from.
RETRAINED_EVENTS = 500_000
TEST_SEED = 100
TGAT, TFTGN = "TGAT, learning weekly", "TF-TGN, learning weekly"
RETRAINED, FROZEN = "TGAT, retrained monthly", "TGAT of January, frozen"
COUNTED = "flights counted"


@dataclass(frozen=True)
class Year:
    """The stream, cut, and what all ways are tested on.

    Attributes:
        codes: features of nodes: random ones of airports, zeros of aircraft.
        january: number of events in it.
        week_ends, month_ends: places in the stream, after January.
        tests: a negative of each event after January.
    """

    events: gf.Events
    codes: Tensor
    january: int
    week_ends: list[int]
    month_ends: list[int]
    tests: Tensor

    def weekly(self, scores: Iterable[np.ndarray]) -> list[tuple[np.ndarray, ...]]:
        """Scores of the events after January, and of their negatives, by week."""
        bounds = [self.january, *self.week_ends]
        return [
            tuple(kind[begin - self.january : end - self.january] for kind in scores)
            for begin, end in pairwise(bounds)
        ]


@dataclass
class Found:
    """What one way gave with one seed.

    Attributes:
        scores: of the events after January, and of their negatives.
        spent: places in the stream, and seconds of training until there.
        reported: average precision of each week, as the loop says it.
        has_same_tests: whether its negatives were those of all ways.
    """

    scores: tuple[np.ndarray, np.ndarray]
    spent: list[tuple[int, float]] = field(default_factory=list)
    reported: list[float] | None = None
    has_same_tests: bool = True

    def seconds_until(self, ends: list[int]) -> np.ndarray:
        """Seconds of training until each place, what begins there included."""
        places, seconds = zip(*self.spent, strict=True)
        return np.array(seconds)[np.searchsorted(places, ends, "right") - 1]


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
    """The flights from January to June, and what all ways are tested on."""
    events = gf.data.flights()
    begins = [datetime.datetime(2013, month, 1, tzinfo=datetime.UTC) for month in range(2, 8)]
    january, *month_ends = np.searchsorted(
        events.t.numpy(), [int(begin.timestamp()) for begin in begins]
    ).tolist()
    events = events[: month_ends[-1]]
    random = torch.Generator().manual_seed(0)
    airports = int(events.dst.min())
    codes = torch.zeros(events.num_nodes, CODE_DIM)
    codes[airports:] = torch.randn(events.num_nodes - airports, CODE_DIM, generator=random)
    tests = Negatives("historical", seed=TEST_SEED)
    tests.observe(events)
    _, week_ends = cut_increments(events, _share(january, len(events)), "1W")
    return Year(events, codes, january, week_ends, month_ends, tests.draw(events[january:]))


def _share(january: int, num_events: int) -> float:
    """The share of warm-up that is January to the event, however it is rounded."""
    return (january + 0.5) / num_events


def model_of(name: str, seed: int) -> tuple[nn.Module, KeepingHead]:
    torch.manual_seed(seed)
    sizes = (DIM, CODE_DIM, 25)
    if name == TFTGN:
        model = gf.models.TFTGN(*sizes, num_blocks=1, dropout=0.0)
    else:
        model = gf.models.TGAT(*sizes, num_layers=1, num_heads=4, dropout=0.0)
    return model, KeepingHead()


def adam(params):
    return torch.optim.Adam(params, lr=RATE, fused=True)


def learn_weekly(year: Year, name: str, seed: int) -> Found:
    model, head = model_of(name, seed)
    graph = gf.TemporalGraph(undirected=True)
    trainer = gf.ContinualTrainer(
        model,
        graph,
        gf.TemporalSampler(graph, [FANOUT]),
        gf.FeatureStore(node=year.codes, edge=year.events.features),
        head=head,
        warmup=_share(year.january, len(year.events)),
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
    trainer.history.negatives = Negatives("historical", seed=TEST_SEED)
    trainer.history.training_negatives = Negatives("historical", seed=seed)
    found, total, end = Found((np.empty(0), np.empty(0))), 0.0, year.january
    found.reported = []
    for one in trainer.run(year.events):
        if not found.spent:
            assert trainer.warmed is not None, "January was learnt before the first week"
            total = trainer.warmed.total_s
            found.spent.append((end, total))
        begin, end = end, end + one.num_events
        drawn = trainer.history.negatives.draw(year.events[begin:end])
        found.has_same_tests &= torch.equal(
            drawn, year.tests[begin - year.january : end - year.january]
        )
        total += one.total_s - one.evaluate_s
        found.spent.append((end, total))
        found.reported.append(one.ap)
    found.scores = head.take()
    return found


@flush_subnormals()
def retrain_monthly(year: Year, seed: int) -> tuple[Found, Found]:
    """The retrained model, and that of January on all later months.

    One graph holds all events from the beginning: it answers as of an event's time, so that its answers
    are those of one that grows, and growing it costs the baseline nothing.
    """
    events = year.events
    graph = gf.TemporalGraph(undirected=True)
    graph.add_edges(events.src, events.dst, events.t, events.eid)
    sampler = gf.TemporalSampler(graph, [FANOUT])
    features = gf.FeatureStore(node=year.codes, edge=events.features)
    negatives = Negatives("historical", seed=seed)
    scores, spent, total, begin, observed = [], [], 0.0, year.january, 0
    frozen: Found | None = None
    for end in year.month_ends:
        model, head = model_of(RETRAINED, seed)
        task = LinkTask(model, head, sampler, BATCH, StageClock(torch.device("cpu")))
        negatives.observe(events[observed:begin])
        started, observed = time.perf_counter(), begin
        optimizer = adam([*model.parameters(), *head.parameters()])
        num_passes = JANUARY_PASSES if frozen is None else round(RETRAINED_EVENTS / begin)
        for number in range(num_passes):
            # The streams of draws that the continual loop has in its first round.
            stream = stream_key(0, number)
            sampler.set_epoch(stream)
            drawn = negatives.draw(events[:begin], stream=stream)
            task.train(events[:begin], drawn, features, optimizer, remember=False)
        total += time.perf_counter() - started
        spent.append((begin, total))
        sampler.set_epoch(0)
        if frozen is None:
            task.evaluate(events[begin:], year.tests, features)
            frozen = Found(head.take(), [(begin, total), (len(events), total)])
            scores.append(tuple(kind[: end - begin] for kind in frozen.scores))
        else:
            tests = year.tests[begin - year.january : end - year.january]
            task.evaluate(events[begin:end], tests, features)
            scores.append(head.take())
        begin = end
    assert frozen is not None, "there are months after January"
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
