"""Tables are written as a whole and read as they were."""

import builtins
import sys

import pytest

from shared.data.frames import check_output, read_frame, write_frame
from shared.errors import DataError

pandas = pytest.importorskip("pandas", reason="tables are read by pandas")


@pytest.mark.parametrize("suffix", [".csv", ".csv.gz", ".parquet"])
def test_what_is_written_is_read_again(tmp_path, suffix):
    if suffix == ".parquet":
        pytest.importorskip("pyarrow", reason="Parquet is read by pyarrow")
    table = pandas.DataFrame({"id": ["007", "x"], "score": [0.25, float("nan")]})
    path = tmp_path / "deep" / f"scores{suffix}"
    write_frame(table, path)
    found = read_frame(path, ids=["id"])
    assert found["id"].tolist() == ["007", "x"]
    assert found["score"].equals(table["score"])
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    if suffix == ".csv.gz":
        assert path.read_bytes()[:2] == b"\x1f\x8b"


@pytest.mark.parametrize(
    ("ids", "found"),
    [
        (["7", "12", "0", "-3", "7"], [7, 12, 0, -3, 7]),
        (["007", "7"], ["007", "7"]),
        (["7", "1.0"], ["7", "1.0"]),
        (["+7"], ["+7"]),
        (["-0"], ["-0"]),
        (["123456789012345678"], [123456789012345678]),
        (["1234567890123456789012"], ["1234567890123456789012"]),
        (["NA", "None", "null", "nan", "DE"], ["NA", "None", "null", "nan", "DE"]),
        (["true", "False"], ["true", "False"]),
        (["7", "x"], ["7", "x"]),
        ([], []),
    ],
)
def test_ids_are_as_they_stand_there(tmp_path, ids, found):
    rows = [f"{one},2.5,{at},NA" for at, one in enumerate(ids)]
    (tmp_path / "x.csv").write_text("\n".join(["id,weight,n,gap", *rows]))
    table = read_frame(tmp_path / "x.csv", ids=["id", "other"])
    assert [*table.columns] == ["id", "weight", "n", "gap"]
    assert table["id"].tolist() == found
    assert table["id"].dtype.kind == ("i" if found and isinstance(found[0], int) else "O")
    if ids:
        assert table["weight"].dtype.kind == "f"
        assert table["gap"].isna().all(), "only ids have no gaps that are written out"


@pytest.mark.parametrize("last", ["NA", "8"])
def test_an_empty_field_is_no_id(tmp_path, last):
    (tmp_path / "x.csv").write_text(f"a,id\n1,7\n2,\n3,{last}\n")
    column = read_frame(tmp_path / "x.csv", ids=["id"])["id"]
    assert column.isna().tolist() == [False, True, False]
    assert column.dropna().tolist() == ["7", last]


def test_what_cannot_be_written_is_told_before_the_work(tmp_path, monkeypatch):
    check_output(tmp_path / "x.csv", [tmp_path / "y.csv"])
    with pytest.raises(DataError, match="expected a table named"):
        check_output(tmp_path / "x.txt", [])
    (tmp_path / "data").mkdir()
    for given in ("data", "data/x.csv"):
        with pytest.raises(
            DataError, match=f"x.csv: expected a table of its own .*/{given}, which"
        ):
            check_output(tmp_path / "data" / "x.csv", [tmp_path / given])
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    check_output(tmp_path / "x.csv", [])
    with pytest.raises(DataError, match=r"x.parquet: needs pandas, and pyarrow"):
        check_output(tmp_path / "x.parquet", [])
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(DataError, match=r"x.csv: needs pandas, .* pip install pandas pyarrow"):
        check_output(tmp_path / "x.csv", [])


def test_other_names_are_refused(tmp_path):
    for use in (lambda path: write_frame(pandas.DataFrame(), path), read_frame):
        with pytest.raises(DataError, match=r"expected a table named .parquet, .csv, .csv.gz"):
            use(tmp_path / "deep" / "scores.txt")
    assert not (tmp_path / "deep").exists()


def test_without_a_library_it_is_told_what_to_install(monkeypatch, tmp_path):
    plain = builtins.__import__

    def without(name, *rest):
        if name in ("pandas", "pyarrow"):
            raise ImportError(name)
        return plain(name, *rest)

    (tmp_path / "x.csv").write_text("a\n1\n")
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(DataError, match=r"x.csv: needs pandas, .*run: pip install pandas pyarrow"):
        read_frame(tmp_path / "x.csv")


def test_a_table_that_cannot_be_written_for_want_of_pyarrow(monkeypatch, tmp_path):
    def refused(*args, **options):
        raise ImportError("pyarrow")

    monkeypatch.setattr(pandas.DataFrame, "to_parquet", refused)
    with pytest.raises(DataError, match="pip install pandas pyarrow"):
        write_frame(pandas.DataFrame({"a": [1]}), tmp_path / "x.parquet")
    assert not list(tmp_path.iterdir())
