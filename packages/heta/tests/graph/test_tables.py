"""Graphs from tables: ids of any form, labels, splits, features, and every refusal with file and row."""

import numpy as np
import pytest
import torch

import shared.errors
from heta.graph.tables import from_tables

pandas = pytest.importorskip("pandas")
DataError = shared.errors.DataError
WRITES, WRITTEN = ("author", "writes", "paper"), ("paper", "written_by", "author")
ABOUT, TOPIC_OF = ("paper", "about", "topic"), ("topic", "topic_of", "paper")

YAML = """
target: paper
nodes:
  paper: {file: papers.csv, id: doi, label: venue, split: split, features: [year, pages]}
  author: {file: authors.csv, id: name, features: authors.npy, ignore: [homepage]}
  topic: {}
edges:
  - {relation: [author, writes, paper], file: writes.csv, src: name, dst: doi, reverse: written_by}
  - {relation: [paper, about, topic], file: topics.csv, src: doi, dst: topic, reverse: topic_of}
"""
PAPERS = (
    "doi,year,pages,venue,split\n10/a,2001,7,VLDB,train\n10/b,2002,8.5,,val\n10/c,1999,9,ICML,\n"
)
AUTHORS = 'name,homepage\n"Ann, A.",x\n007,y\n'
WRITES_TABLE = 'name,doi\n007,10/c\n"Ann, A.",10/a\n007,10/a\n'
TOPICS = "doi,topic\n10/b,7\n10/a,3\n10/c,7\n"


@pytest.fixture
def folder(tmp_path):
    np.save(tmp_path / "authors.npy", np.array([[1.0, 2.0], [3.0, 4.0]]))
    texts = {
        "graph.yaml": YAML,
        "papers.csv": PAPERS,
        "authors.csv": AUTHORS,
        "writes.csv": WRITES_TABLE,
        "topics.csv": TOPICS,
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def replace(folder, name, old, new):
    text = (folder / name).read_text()
    assert old in text
    (folder / name).write_text(text.replace(old, new, 1))


def edges(graph, relation):
    ids = graph.node_ids
    src, dst = (end.tolist() for end in graph.edges[relation])
    return [(ids[relation[0]][a], ids[relation[2]][b]) for a, b in zip(src, dst, strict=True)]


def test_reads_all_that_the_yaml_names(folder):
    graph = from_tables(folder / "graph.yaml")
    assert graph.num_nodes == {"paper": 3, "author": 2, "topic": 2}
    assert graph.schema.relations == (WRITES, WRITTEN, ABOUT, TOPIC_OF)
    assert graph.schema.learnable == ("topic",)
    assert edges(graph, WRITES) == [("007", "10/c"), ("Ann, A.", "10/a"), ("007", "10/a")]
    assert edges(graph, WRITTEN) == [pair[::-1] for pair in edges(graph, WRITES)]
    assert edges(graph, ABOUT) == [("10/b", "7"), ("10/a", "3"), ("10/c", "7")]
    assert graph.feat["paper"].tolist() == [[2001, 7], [2002, 8.5], [1999, 9]]
    assert graph.feat["author"].tolist() == [[1, 2], [3, 4]]
    assert graph.label.tolist() == [1, -1, 0]
    assert graph.class_names == ("ICML", "VLDB")
    assert {split: mask.tolist() for split, mask in graph.masks.items()} == {
        "train": [True, False, False],
        "val": [False, True, False],
    }


def test_parquet_gives_the_same(folder):
    pytest.importorskip("pyarrow")
    expected = from_tables(folder / "graph.yaml").fingerprint()
    for name in ("papers", "authors", "writes", "topics"):
        texts = {"name": str, "doi": str}
        pandas.read_csv(folder / f"{name}.csv", dtype=texts).to_parquet(folder / f"{name}.parquet")
        replace(folder, "graph.yaml", f"{name}.csv", f"{name}.parquet")
    assert from_tables(folder / "graph.yaml").fingerprint() == expected


def test_ids_match_across_tables_that_have_them_as_numbers_and_as_texts(folder):
    (folder / "papers.csv").write_text(PAPERS.replace("10/a", "1").replace("10/b", "2"))
    replace(folder, "writes.csv", '"Ann, A.",10/a\n007,10/a\n', '"Ann, A.",1\n')
    (folder / "topics.csv").write_text("doi,topic\n2,7\n1.0,3\n")
    graph = from_tables(folder / "graph.yaml")
    assert edges(graph, WRITES) == [("007", "10/c"), ("Ann, A.", "1")]
    assert edges(graph, ABOUT) == [("2", "7"), ("1", "3")]


def test_labels_of_numbers_keep_them(folder):
    (folder / "papers.csv").write_text(PAPERS.replace("VLDB", "3").replace("ICML", "0"))
    graph = from_tables(folder / "graph.yaml")
    assert graph.label.tolist() == [3, -1, 0]
    assert graph.class_names == ()


def test_a_graph_without_labels_or_splits_is_read(folder):
    replace(folder, "graph.yaml", "label: venue, split: split, ", "ignore: [venue, split], ")
    graph = from_tables(folder / "graph.yaml")
    assert graph.label is None
    assert graph.masks == {}


@pytest.mark.parametrize(
    ("name", "old", "new", "message"),
    [
        ("graph.yaml", "target: paper", "target: book", r"target: expected one of .*got 'book'"),
        ("graph.yaml", "target: paper", "goal: paper", r"expected target, nodes, edges, got \['goal"),
        ("graph.yaml", "target: paper", "target: [", "expected YAML"),
        ("graph.yaml", "edges:\n", "edges:\n  - 5\n", r"edges\[0\]: expected relation, .* got 5"),
        ("graph.yaml", "about, topic]", "about, book]", "types of .*got 'book'"),
        ("graph.yaml", "about, topic]", "about]", r"edges\[1\]: relation: expected \[source"),
        ("graph.yaml", "id: doi, ", "", "nodes of 'paper': expected file, id, and perhaps"),
        ("graph.yaml", "topic: {}", "topic: {label: a}", "nodes of 'topic': expected file, id"),
        ("graph.yaml", "features: authors.npy", "label: name", "'author': expected file, id, and"),
        ("graph.yaml", "reverse: topic_of", "weight: w", r"edges\[1\]: expected .*got .*weight"),
        ("graph.yaml", "[year, pages]", "[year]", r"papers.csv: expected .*got also pages;"),
        ("graph.yaml", "ignore: [homepage]", "ignore: []", "authors.csv: expected .*also homepage"),
        ("graph.yaml", "pages]", "sheets]", "expected a column 'sheets' in .*papers.csv, got"),
        ("graph.yaml", "writes.csv", "none.csv", "none.csv"),
        ("graph.yaml", "authors.npy", "papers.csv", "papers.csv: expected an .npy file"),
        ("papers.csv", "10/c,1999", "10/a,1999", "papers.csv, row 2: doi: .* got '10/a' again"),
        ("papers.csv", "10/c,1999", ",1999", "papers.csv: .*doi"),
        ("papers.csv", "8.5", "many", "papers.csv, row 1: pages: expected a number, got 'many'"),
        ("papers.csv", "8.5", "", "papers.csv, row 1: pages: expected a finite number, got nan"),
        ("papers.csv", "2001", "99999999", "papers.csv: year'.* float32 holds exactly, got 99999999"),
        ("papers.csv", ",val", ",valid", "row 1: split: expected train, val, test .* got 'valid'"),
        ("writes.csv", "007,10/a", "008,10/a", "row 2: name: .* node of 'author', got '008'; add"),
        ("writes.csv", "name,doi", "name,isbn", "expected a column 'doi' in .*writes.csv"),
        ("topics.csv", "10/b,7", "10/b,", "topics.csv: .*topic"),
    ],
)  # fmt: skip
def test_refuses(folder, name, old, new, message):
    replace(folder, name, old, new)
    with pytest.raises(DataError, match=message):
        from_tables(folder / "graph.yaml")


def test_refuses_a_relation_twice(folder):
    replace(folder, "graph.yaml", "[paper, about, topic]", "[author, writes, paper]")
    replace(
        folder,
        "graph.yaml",
        "file: topics.csv, src: doi, dst: topic",
        "file: writes.csv, src: name, dst: doi",
    )
    with pytest.raises(DataError, match=r"expected each relation once, got .*'writes'.* again"):
        from_tables(folder / "graph.yaml")


def test_refuses_classes_that_are_no_whole_numbers(folder):
    (folder / "papers.csv").write_text(PAPERS.replace("VLDB", "3.5").replace("ICML", "0"))
    with pytest.raises(DataError, match=r"papers.csv: label of node 0 of 'venue': .* got 3.5"):
        from_tables(folder / "graph.yaml")


def test_refuses_features_of_another_length(folder):
    np.save(folder / "authors.npy", torch.zeros(3, 1).numpy())
    with pytest.raises(
        DataError, match=r"authors.npy: expected a row for each of the 2 rows of .*got 3"
    ):
        from_tables(folder / "graph.yaml")
