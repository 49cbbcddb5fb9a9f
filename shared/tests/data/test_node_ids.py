"""Ids of users are found again by number and by name, also after a file."""

import pytest

from shared.data.node_ids import NodeIds
from shared.errors import DataError

pandas = pytest.importorskip("pandas", reason="columns are pandas's")


def number(src, dst, *, is_bipartite=False):
    return NodeIds.number(pandas.Series(src), pandas.Series(dst), is_bipartite=is_bipartite)


def test_rows_that_are_appended_leave_numbers_as_they_are():
    src, dst, nodes = number(["b", "a"], ["a", "c"])
    more, ends, grown = number(["b", "a", "d"], ["a", "c", "b"])
    assert more[:2].tolist() == src.tolist() == [0, 1]
    assert ends[:2].tolist() == dst.tolist() == [1, 2]
    assert grown.ids[: len(nodes)].tolist() == nodes.ids.tolist() == ["b", "a", "c"]


@pytest.mark.parametrize("is_bipartite", [False, True])
@pytest.mark.parametrize("text", ["x\ny", "x\ry", "x\r\ny", "x\0y", " x "])
def test_a_file_keeps_everything(tmp_path, is_bipartite, text):
    _, _, nodes = number(['a,"b"', text, "007"], ["7", "", "7"], is_bipartite=is_bipartite)
    nodes.save(tmp_path / "deep" / "nodes.csv")
    same = NodeIds.load(tmp_path / "deep" / "nodes.csv")
    assert same.ids.tolist() == nodes.ids.tolist()
    assert same.num_sources == nodes.num_sources == (3 if is_bipartite else None)


def test_the_file_is_a_table_of_nodes_and_ids(tmp_path):
    number([5, 6], [5, 9], is_bipartite=True)[2].save(tmp_path / "two.csv")
    assert (tmp_path / "two.csv").read_text().splitlines() == [
        "node,id,side",
        "0,5,src",
        "1,6,src",
        "2,5,dst",
        "3,9,dst",
    ]
    number(["a"], ["b"])[2].save(tmp_path / "one.csv")
    assert (tmp_path / "one.csv").read_text() == "node,id\n0,a\n1,b\n"


def test_ids_are_found_on_their_side():
    _, _, one = number([5, 6], [9, 5])
    assert one.find(pandas.Series([9, 5, 7]), "src").tolist() == [1, 0, -1]
    _, _, two = number([5, 6], [9, 5], is_bipartite=True)
    assert two.find(pandas.Series([5, 6, 9]), "src").tolist() == [0, 1, -1]
    assert two.find(pandas.Series(["5", "6", "9"]), "dst").tolist() == [3, -1, 2]


@pytest.mark.parametrize(
    "text", ["", "node,name\n0,a\n", "node,id\n0,a\n2,b\n", "node,id\n0\n", "node,id\n0,a\n1\n"]
)
def test_other_files_are_refused(tmp_path, text):
    (tmp_path / "nodes.csv").write_text(text)
    with pytest.raises(DataError, match=r"nodes.csv: expected "):
        NodeIds.load(tmp_path / "nodes.csv")
    with pytest.raises(DataError, match=r"none.csv: expected a table of nodes and their ids"):
        NodeIds.load(tmp_path / "none.csv")
