"""`gnnflow demo`: a graph of real flights that grows by the day, and a model that learns with it.

A month of departures, or three, goes into a graph in increments. Beside it, in turn: a sorted adjacency rebuilt
at every increment, with the same answers; the model as it was after its first round;
and a cache of edge features against the best that any cache of its size could do.
"""

from __future__ import annotations

import copy
import math
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from gnnflow.config import Recipe
from gnnflow.data import flights
from gnnflow.features.belady import count_belady_hits
from gnnflow.features.cache import FeatureCache
from gnnflow.features.store import FeatureStore
from gnnflow.profiler import time_insertion
from gnnflow.sampling.sampler import TemporalSampler
from gnnflow.training import report
from gnnflow.training.continual import ContinualTrainer
from gnnflow.training.rounds import Round
from shared.claims import Claim, finish, pair_turns
from shared.data.events import Events
from shared.kernels.temporal import Adjacency, sample
from shared.training.cores import count_free_cores
from shared.training.progress import show_progress

__all__ = [
    "compare_learning",
    "learn_and_stop",
    "measure_cache",
    "measure_insertion",
    "rebuild_adjacency",
    "run",
]

_SOURCE = "gnnflow demo"
_INCREMENT = 1000
_REPEATS = 3
_SHARE = 0.2
_TITLE = "Where aircraft fly next: a model that goes on learning, and one that stopped"


def run(out: Path, *, is_full: bool) -> bool:
    """Runs the demo, writes demo.json and a picture, and prints the claims to stderr.

    Args:
        out: folder, made if missing.
        is_full: three months instead of one.

    Returns:
        Whether every claim's result was correct.
    """
    out.mkdir(parents=True, exist_ok=True)
    # January, or January to March.
    events = flights(80_000 if is_full else 26_000)
    before = torch.get_num_threads()
    torch.set_num_threads(min(before, count_free_cores()))
    try:
        with show_progress("gnnflow: growing a graph, and rebuilding one"):
            inserted = measure_insertion(events)
        with show_progress("gnnflow: sampling through a cache"):
            cached = measure_cache(events)
        with show_progress("gnnflow: learning day by day, and not any more"):
            going, stopped = learn_and_stop(events)
    finally:
        torch.set_num_threads(before)
    claims = [inserted, cached, compare_learning(going, stopped, events)]
    curves = {"learning on": going, "stopped after the first day": stopped}
    report.draw(curves, out / "continual.svg", title=_TITLE, is_unix_time=True)
    figures = {name: [one.to_json() for one in rounds] for name, rounds in curves.items()}
    return finish(out, "gnnflow", claims, figures)


def measure_insertion(events: Events) -> Claim:
    """Seconds to insert the events by increments, against rebuilding, and whether samples agree."""
    inserted, rebuilt, graph, adjacency = [], [], None, None
    for repeat in range(_REPEATS + 1):
        seconds, graph = time_insertion(events, _INCREMENT)
        begin = time.perf_counter()
        for end in range(_INCREMENT, len(events) + _INCREMENT, _INCREMENT):
            adjacency = rebuild_adjacency(events[:end])
        if repeat:  # the first one warms up
            inserted.append(seconds)
            rebuilt.append(time.perf_counter() - begin)
    assert graph is not None, "there was at least one repeat"
    assert adjacency is not None, "as there was of this"
    roots = torch.cat([events.src, events.dst])
    times = torch.cat([events.t, events.t])
    ours = TemporalSampler(graph, [10]).sample(roots, times).layers[0]
    theirs = sample(adjacency, roots, times, 10)
    is_same = not isinstance(ours, list) and all(
        torch.equal(getattr(ours, name), getattr(theirs, name))
        for name in ("nodes", "times", "dt", "eids", "row")
    )
    return Claim(
        name=f"departures inserted by {_INCREMENT:,}",
        unit="s",
        **pair_turns(inserted, rebuilt),
        baseline_name="a sorted adjacency rebuilt at every increment",
        correct=is_same,
        detail=f"{len(events):,} departures in both directions, median of {_REPEATS}; the ten "
        f"newest neighbours of both ends of every event are the same in both",
        source=_SOURCE,
    )


def rebuild_adjacency(events: Events) -> Adjacency:
    """Both directions of all events, sorted; an event's two entries stand as insertion puts them."""
    src = torch.stack([events.src, events.dst], 1).view(-1)
    dst = torch.stack([events.dst, events.src], 1).view(-1)
    return Adjacency.from_edges(
        src, dst, events.t.repeat_interleave(2), events.eid.repeat_interleave(2)
    )


def measure_cache(events: Events) -> Claim:
    """Edge features found in a cache while the events are sampled, against Belady's bound."""
    assert events.features is not None, "flights have features"
    _, graph = time_insertion(events, _INCREMENT)
    sampler = TemporalSampler(graph, [10, 10])
    store = FeatureStore(edge=events.features)
    cache = FeatureCache(store, edge=_SHARE)
    batches, is_same = [], True
    for at in range(0, len(events), 600):
        part = events[at : at + 600]
        mfg = sampler.sample(torch.cat([part.src, part.dst]), part.t.repeat(2))
        ids = torch.cat([block.eids for block in mfg.blocks()]).unique()
        batches.append(ids)
        is_same &= torch.equal(cache.fetch("edge", ids), store.gather("edge", ids))
    found = cache.stats()["edge"]
    total = sum(len(ids) for ids in batches)
    best = count_belady_hits(batches, found.num_slots) / total
    return Claim(
        name=f"edge features found in a cache of {100 * _SHARE:.0f} % of them",
        unit="of all asked for",
        ours=found.hit_ratio,
        baseline=best,
        baseline_name="Belady's bound, which knows the future",
        higher_is_better=True,
        correct=is_same and found.hit_ratio <= best,
        detail=f"{total:,} rows of two hops of ten, policy keep; every row equals the store's",
        source=_SOURCE,
    )


def learn_and_stop(events: Events) -> tuple[list[Round], list[Round]]:
    """The rounds of a model that goes on learning, and of one that stops after the first round."""
    parts = Recipe(model="tf-tgn", dim=32, num_layers=1, seed=0).build(events)
    trainer = ContinualTrainer(
        **parts._asdict(), warmup=0.3, every="1D", num_negatives=1, progress=False
    )
    going: list[Round] = []
    stopped: list[Round] = []
    first, task = None, trainer.task
    for found in trainer.run(events):
        going.append(found)
        if first is None:
            first = copy.copy(task)
            first.model, first.head = copy.deepcopy(parts.model), copy.deepcopy(parts.head)
            stopped.append(found)
            continue
        # The graph holds this increment and nothing later, as it did when the other was evaluated.
        end = len(events) - int((events.t >= found.time).sum()) + found.num_events
        trainer.task = first
        trainer.clock.take()
        with trainer.clock.stage("evaluate"):
            scores = trainer.evaluate(events[end - found.num_events : end])
        trainer.task = task
        spent = trainer.clock.take()
        # Of the graph, which both share: what came in was inserted once.
        spent["insert_s"] = found.insert_s
        idle: dict[str, Any] = {"num_replayed": 0, "loss": math.nan}
        stopped.append(replace(found, **idle, **spent, **scores._asdict()))
    return going, stopped


def compare_learning(going: list[Round], stopped: list[Round], events: Events) -> Claim:
    """Average precision of both, after the first round; correct where learning on is better."""

    def mean(rounds: list[Round]) -> float:
        return sum(one.ap * one.num_events for one in rounds) / sum(o.num_events for o in rounds)

    # The first round is one model's, evaluated once.
    learnt, frozen = mean(going[1:]), mean(stopped[1:])
    return Claim(
        name="average precision over the days after the first round, evaluated before they are learnt",
        unit="of 1",
        ours=learnt,
        baseline=frozen,
        baseline_name="the same model, not trained after the first round",
        higher_is_better=True,
        correct=learnt > max(frozen, 0.55) and len(going) == len(stopped),
        detail=f"TF-TGN, {len(events):,} departures, {len(going)} rounds of a day; one random "
        f"negative an event",
        source=_SOURCE,
    )
