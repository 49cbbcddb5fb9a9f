"""The files of a partition, put together again: the very same graph, and lists that fit in pairs."""

import json
import os
from collections import Counter

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file

from adaqp.graphs.generated import sbm
from adaqp.graphs.graph import Graph
from adaqp.messages.distgraph import load
from adaqp.partitioning.partitioner import METHODS, partition
from shared.errors import ConfigError, DataError

MASKS = ("train_mask", "val_mask", "test_mask")


def make_graph(num_nodes, edges, dtype=torch.float32, *, train=None):
    """Features tell nodes apart; every third node is in another mask."""
    src, dst = torch.tensor(list(edges), dtype=torch.int64).reshape(-1, 2).T.contiguous()
    node = torch.arange(num_nodes)
    masks = [node % 3 == turn for turn in range(3)]
    if train is not None:
        masks = [torch.isin(node, torch.tensor(train)), *(torch.zeros(2, num_nodes) > 0)]
    return Graph(
        src=src,
        dst=dst,
        num_nodes=num_nodes,
        feat=torch.stack([node, node % 7], dim=1).to(dtype),
        label=node % 4,
        **dict(zip(MASKS, masks, strict=True)),
    )


def load_all(out):
    meta = json.loads((out / "meta.json").read_text())
    parts = [load_file(out / f"part{rank}.safetensors") for rank in range(meta["parts"])]
    return meta, parts


def check(graph, out, owner=None):
    """Everything the format promises, by brute force."""
    meta, parts = load_all(out)
    edges = list(zip(graph.src.tolist(), graph.dst.tolist(), strict=True))
    in_degree, out_degree = Counter(v for _, v in edges), Counter(u for u, _ in edges)
    loops = Counter(v for u, v in edges if u == v)
    holder = {int(i): r for r, part in enumerate(parts) for i in part["global_ids"]}
    assert sorted(holder) == list(range(graph.num_nodes))
    assert sum(len(part["global_ids"]) for part in parts) == graph.num_nodes
    if owner is not None:
        assert [holder[i] for i in range(graph.num_nodes)] == owner.tolist()

    found = []
    for rank, part in enumerate(parts):
        info = meta["parts_info"][rank]
        ids, halo = part["global_ids"].tolist(), part["halo_ids"].tolist()
        num_local, central = info["num_local"], ids[: info["num_central"]]
        needs = {v for u, v in edges if holder[v] == rank and holder[u] != rank}
        assert set(central) == set(ids) - needs
        if not meta["cluster_rows"]:
            assert central == sorted(central)
            assert ids[len(central) :] == sorted(needs)
        for name in ("feat", "label", *MASKS):
            assert part[name].dtype == getattr(graph, name).dtype
            assert torch.equal(part[name], getattr(graph, name)[part["global_ids"]])
        remote = {u for u, v in edges if holder[v] == rank and holder[u] != rank}
        rows = [part["global_ids"].tolist() for part in parts]
        assert halo == sorted(remote, key=lambda u: (holder[u], rows[holder[u]].index(u)))
        assert len(ids) == num_local
        assert (info["num_halo"], info["num_train"]) == (len(halo), int(part["train_mask"].sum()))
        bounds = part["halo_offsets"].tolist()
        assert [bounds[0], bounds[-1], len(bounds)] == [0, len(halo), len(parts) + 1]
        for peer, other in enumerate(parts):
            wanted = halo[bounds[peer] : bounds[peer + 1]]
            assert {holder[u] for u in wanted} <= {peer} - {rank}
            first, last = other["send_offsets"][rank], other["send_offsets"][rank + 1]
            sent = other["global_ids"][other["send_rows"][first:last]].tolist()
            assert sent == wanted
        assert part["send_offsets"][0] == 0
        assert part["send_offsets"][-1] == len(part["send_rows"])

        columns = ids + halo
        indptr, indices = part["indptr"].tolist(), part["indices"].tolist()
        assert [indptr[0], indptr[-1], len(indptr)] == [0, len(indices), num_local + 1]
        for row in range(num_local):
            sources = indices[indptr[row] : indptr[row + 1]]
            assert sources == sorted(sources)
            found += [(columns[column], ids[row]) for column in sources]
        for name, expected in (
            ("in_degree", in_degree), ("out_degree", out_degree), ("loops", loops)
        ):  # fmt: skip
            assert part[name].tolist() == [expected[i] for i in ids]
            assert part[f"halo_{name}"].tolist() == [expected[i] for i in halo]
        integers = set(part) - {"feat", "label", *MASKS}
        assert {part[name].dtype for name in integers} == {torch.int64}

    assert sorted(found) == sorted(edges)
    assert meta["edge_cut"] == sum(holder[u] != holder[v] for u, v in edges)
    assert meta["num_edges"] == len(edges)
    return meta, parts


@st.composite
def cut_graphs(draw):
    num_nodes = draw(st.integers(1, 14))
    node = st.integers(0, num_nodes - 1)
    edges = draw(st.lists(st.tuples(node, node), max_size=40))
    parts = draw(st.integers(1, min(5, num_nodes)))
    # Drawn freely: parts without nodes, nodes without edges, graphs cut nowhere.
    one_part = st.integers(0, parts - 1)
    owner = draw(st.lists(one_part, min_size=num_nodes, max_size=num_nodes))
    return make_graph(num_nodes, edges), parts, torch.tensor(owner), draw(st.sampled_from([0, 4]))


@given(cut_graphs())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_multigraph_under_any_assignment_comes_back(tmp_path, case):
    graph, parts, owner, cluster_rows = case
    pytest.importorskip("pymetis")
    report = partition(graph, parts, owner, out=tmp_path / "cut", cluster_rows=cluster_rows)
    meta, _ = check(graph, tmp_path / "cut", owner)
    assert meta["method"] == report.method == "given"
    assert meta["symmetric"] == graph.is_symmetric


@pytest.mark.parametrize("method", ["metis", "random"])
def test_consecutive_rows_share_their_sources(tmp_path, method):
    pytest.importorskip("pymetis")
    graph = sbm(2_000, blocks=20, degree=20, mix=0.1, feat=2)
    distinct = {}
    for rows in (0, 100):
        report = partition(graph, 2, method, out=tmp_path / str(rows), cluster_rows=rows)
        assert f"rows {'in clusters of 100' if rows else 'by id'}" in str(report)
        distinct[rows] = 0
        for part in load_all(tmp_path / str(rows))[1]:
            for first in range(0, 950, 50):
                start, stop = part["indptr"][first], part["indptr"][first + 50]
                distinct[rows] += len(part["indices"][start:stop].unique())
    assert distinct[100] < distinct[0] / 2


def test_without_metis_rows_keep_the_order_of_their_ids(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("adaqp.partitioning.partitioner.find_spec", lambda name: None)
    graph = sbm(90, blocks=3, degree=6, feat=5)
    report = partition(graph, 2, "random", out=tmp_path / "cut", cluster_rows=10)
    assert "pip install pymetis" in caplog.text
    assert report.cluster_rows == 0
    check(graph, tmp_path / "cut")
    with pytest.raises(ConfigError, match="cluster_rows: expected 0 or more, got -1"):
        partition(graph, 2, "random", out=tmp_path / "cut", cluster_rows=-1)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("parts", [1, 2, 3])
def test_every_method_balances_and_comes_back(tmp_path, method, parts):
    if method != "random":
        pytest.importorskip("pymetis")
    graph = sbm(90, blocks=3, degree=6, feat=5, seed=1)
    report = partition(graph, parts, method, out=tmp_path / "cut", seed=3)
    meta, files = check(graph, tmp_path / "cut")
    assert [part.num_local for part in report.parts] == [len(f["global_ids"]) for f in files]
    assert max(part.num_local for part in report.parts) <= 1.15 * 90 / parts
    assert (meta["format"], meta["parts"], meta["method"], meta["seed"]) == (1, parts, method, 3)
    assert (meta["num_feat"], meta["num_classes"], meta["multilabel"]) == (5, 3, False)
    assert meta["fingerprint"] == report.fingerprint
    assert meta["graph_fingerprint"] == graph.fingerprint()


def test_metis_cuts_fewer_edges_than_chance(tmp_path):
    pytest.importorskip("pymetis")
    graph = sbm(2000, blocks=8, degree=10, feat=2)
    metis = partition(graph, 4, out=tmp_path / "metis")
    chance = partition(graph, 4, "random", out=tmp_path / "random")
    assert metis.edge_cut < 0.4 * chance.edge_cut
    assert chance.local_edge_share == pytest.approx(0.25, abs=0.02)


def test_graph_and_random_cut_of_one_seed_are_independent(tmp_path):
    graph = sbm(4000, blocks=4, degree=4, mix=0.0, feat=1, seed=0)
    report = partition(graph, 4, "random", out=tmp_path / "cut", seed=0)
    assert report.local_edge_share == pytest.approx(0.25, abs=0.03)


def test_a_cut_through_nothing_has_no_halo(tmp_path):
    graph = make_graph(6, [(0, 1), (1, 0), (2, 2), (4, 5), (4, 5)])
    report = partition(graph, 2, torch.tensor([0, 0, 0, 1, 1, 1]), out=tmp_path / "cut")
    _, parts = check(graph, tmp_path / "cut")
    assert report.edge_cut == 0
    assert report.local_edge_share == 1.0
    assert all(len(part["halo_ids"]) == len(part["send_rows"]) == 0 for part in parts)
    assert [part.num_marginal for part in report.parts] == [0, 0]


def test_a_part_may_lack_training_nodes_and_another_everything(tmp_path):
    graph = make_graph(4, [(0, 3), (3, 0)], train=[0])
    report = partition(graph, 3, torch.tensor([0, 0, 2, 2]), out=tmp_path / "cut")
    check(graph, tmp_path / "cut")
    assert [part.num_train for part in report.parts] == [1, 0, 0]
    assert [part.num_local for part in report.parts] == [2, 0, 2]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_feature_types_are_kept(tmp_path, dtype):
    graph = make_graph(5, [(0, 4), (4, 1)], dtype)
    partition(graph, 2, torch.tensor([0, 0, 1, 1, 1]), out=tmp_path / "cut")
    check(graph, tmp_path / "cut")


def test_multilabel_targets_travel(tmp_path):
    base = make_graph(4, [(0, 1), (2, 3)])
    names = ("src", "dst", "num_nodes", "feat", *MASKS)
    graph = Graph(label=torch.eye(4)[:, :3], **{name: getattr(base, name) for name in names})
    partition(graph, 2, "random", out=tmp_path / "cut")
    meta, _ = check(graph, tmp_path / "cut")
    assert (meta["multilabel"], meta["num_classes"]) == (True, 3)


def test_headers_tell_files_of_different_cuts_apart(tmp_path):
    graph = make_graph(8, [(i, (i + 1) % 8) for i in range(8)])
    first = partition(graph, 2, "random", out=tmp_path / "a", seed=0)
    again = partition(graph, 2, "random", out=tmp_path / "b", seed=0)
    other = partition(graph, 2, "random", out=tmp_path / "c", seed=1)
    assert first.fingerprint == again.fingerprint != other.fingerprint
    with safe_open(tmp_path / "a" / "part1.safetensors", "pt") as file:
        assert file.metadata() == {
            "fingerprint": first.fingerprint, "rank": "1", "parts": "2", "format": "1"
        }  # fmt: skip


def test_the_report_is_a_table(tmp_path):
    graph = make_graph(6, [(0, 1), (1, 2), (2, 3), (3, 0)])
    report = partition(graph, 2, torch.tensor([0, 0, 1, 1, 1, 1]), out=tmp_path / "cut")
    head, names, *rows = str(report).splitlines()
    assert head == "2 parts by given: 2 of 4 edges cut, 50.0 % local; rows in clusters of 2,048"
    assert names.split() == [
        "part",
        "nodes",
        "central",
        "marginal",
        "halo",
        "train",
        "edges",
        "local",
        "file",
    ]
    assert rows[0].split()[:6] == ["0", "2", "1", "1", "1", "1"]
    assert rows[1].split()[:6] == ["1", "4", "3", "1", "1", "1"]


def test_an_earlier_partition_is_replaced_whole(tmp_path):
    graph = make_graph(6, [(0, 1)])
    partition(graph, 3, "random", out=tmp_path / "cut")
    partition(graph, 2, "random", out=tmp_path / "cut")
    names = sorted(path.name for path in (tmp_path / "cut").iterdir())
    assert names == ["meta.json", "part0.safetensors", "part1.safetensors"]
    assert [path.name for path in tmp_path.iterdir()] == ["cut"]


def test_an_empty_folder_and_missing_parents_are_fine(tmp_path):
    (tmp_path / "empty").mkdir()
    for out in (tmp_path / "empty", tmp_path / "a" / "b"):
        partition(make_graph(2, []), 2, "random", out=out)
        check(make_graph(2, []), out)


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o002])
def test_all_files_have_the_umasks_mode(tmp_path, umask):
    before = os.umask(umask)
    try:
        partition(sbm(100, blocks=2, degree=6), 2, "random", out=tmp_path / "parts")
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "parts").iterdir()}
    assert len(modes) == 3
    assert set(modes.values()) == {0o666 & ~umask}, modes


@pytest.mark.parametrize("damage", ["cut short", "a folder"])
def test_a_part_that_cannot_be_read_is_told_as_that(tmp_path, damage):
    partition(sbm(100, blocks=2, degree=6), 1, "random", out=tmp_path / "parts")
    path = tmp_path / "parts/part0.safetensors"
    if damage == "cut short":
        path.write_bytes(path.read_bytes()[:1000])
    else:
        path.unlink()
        path.mkdir()
    with pytest.raises(DataError, match=r"rank 0: .*part0.safetensors cannot be read: "):
        load(tmp_path / "parts")


def test_a_failed_write_leaves_what_was_there(tmp_path, monkeypatch):
    graph = make_graph(6, [(0, 1)])
    kept = partition(graph, 2, "random", out=tmp_path / "cut")
    monkeypatch.setattr("adaqp.partitioning.partitioner.json.dumps", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        partition(graph, 3, "random", out=tmp_path / "cut")
    monkeypatch.undo()
    assert [path.name for path in tmp_path.iterdir()] == ["cut"]
    assert load_all(tmp_path / "cut")[0]["fingerprint"] == kept.fingerprint


def test_a_foreign_folder_is_left_alone(tmp_path):
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(DataError, match=r"out: expected an empty folder .* holds 'thesis.txt'"):
        partition(make_graph(2, []), 1, out=tmp_path)
    with pytest.raises(DataError, match=r"out: expected a folder, .*thesis.txt is a file"):
        partition(make_graph(2, []), 1, out=tmp_path / "thesis.txt")
    assert (tmp_path / "thesis.txt").read_text() == "mine"


@pytest.mark.parametrize(
    ("parts", "method", "error", "message"),
    [
        (0, "random", ConfigError, r"parts: expected 1 to 4 \(the number of nodes\), got 0"),
        (-2, "random", ConfigError, "got -2"),
        (5, "random", ConfigError, "got 5"),
        (
            2,
            "louvain",
            ConfigError,
            "method: expected one of metis, pymetis, random, got 'louvain'",
        ),
        (2, torch.zeros(3).long(), DataError, r"expected an int64 tensor \[4\] .* \(3,\)"),
        (2, torch.tensor([0, 1, 2, 0]), DataError, "node 2 is given to part 2, expected 0 to 1"),
        (2, torch.tensor([0, -1, 1, 0]), DataError, "node 1 is given to part -1"),
    ],
)
def test_bad_arguments_write_nothing(tmp_path, parts, method, error, message):
    with pytest.raises(error, match=message):
        partition(make_graph(4, [(0, 1)]), parts, method, out=tmp_path / "cut")
    assert list(tmp_path.iterdir()) == []
