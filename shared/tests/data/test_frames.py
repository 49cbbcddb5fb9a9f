"""Tables are written as a whole and read as they were."""

import builtins

import pytest

from shared.data.frames import read_frame, write_frame
from shared.errors import DataError

pandas = pytest.importorskip("pandas", reason="tables are read by pandas")


@pytest.mark.parametrize("suffix", [".csv", ".csv.gz", ".parquet"])
def test_what_is_written_is_read_again(tmp_path, suffix):
    if suffix == ".parquet":
        pytest.importorskip("pyarrow", reason="Parquet is read by pyarrow")
    table = pandas.DataFrame({"id": ["007", "x"], "score": [0.25, float("nan")]})
    path = tmp_path / "deep" / f"scores{suffix}"
    write_frame(table, path)
    assert read_frame(path, texts=["id"]).equals(table)
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    if suffix == ".csv.gz":
        assert path.read_bytes()[:2] == b"\x1f\x8b"


def test_columns_of_texts_are_not_taken_for_numbers(tmp_path):
    (tmp_path / "x.csv").write_text("id\n007\n")
    assert read_frame(tmp_path / "x.csv")["id"].tolist() == [7]
    assert read_frame(tmp_path / "x.csv", texts=["id"])["id"].tolist() == ["007"]


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
