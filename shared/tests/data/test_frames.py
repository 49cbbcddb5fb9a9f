"""Tables are written as a whole and read as they were."""

import builtins
import csv
import os
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
        (["7", "1.0", "3."], [7, 1, 3]),
        (["x", "1.0"], ["x", "1.0"]),
        (["1.5", "2.5"], ["1.5", "2.5"]),
        (["+7"], ["+7"]),
        (["-0", "0"], [0, 0]),
        ([" 7", "8\t"], [7, 8]),
        (["a b ", "\tc"], ["a b", "c"]),
        (["12345678901234567890.0", "2.0"], ["12345678901234567890", "2"]),
        (["0x1f", "1e5", "100000"], ["0x1f", "1e5", "100000"]),
        (["2024-05-01", "5%"], ["2024-05-01", "5%"]),
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


@pytest.mark.parametrize("other", ["1", "1.00"])
def test_one_number_in_two_spellings_among_texts_is_refused(tmp_path, other):
    (tmp_path / "x.csv").write_text(f"src,dst\n1.0,x\ny,{other}\n")
    with pytest.raises(
        DataError, match=r"ids: expected one spelling of each .* '1.0'.* among texts"
    ):
        read_frame(tmp_path / "x.csv", ids=["src", "dst"])


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        ("a,b\n1,2,\n3,4,\n", [(1, 2), (3, 4)]),
        ("a,b,\n1,2,\n3,4\n", [(1, 2), (3, 4)]),
        ("a,b\n1,2\n3,4, ,\n", [(1, 2), (3, 4)]),
        (",a,b\n0,1,2\n1,3,4\n", [(1, 2), (3, 4)]),
        ("a, b\n1, 2\n3 ,\t4\n", [(1, 2), (3, 4)]),
        ('"a","b"\n"1","2"\n', [(1, 2)]),
        ("\n  \na,b\n\n1,2\n \n\n", [(1, 2)]),
        ("a,b\r1,2\r3,4\r", [(1, 2), (3, 4)]),
        ("a,b\r\n1,2\r\n", [(1, 2)]),
        ("\ufeffa,b\n1,2\n", [(1, 2)]),
        ('\ufeff"a",b\n1,2\n', [(1, 2)]),
        ('a,b\n1, "x, y"\n2,"say ""hi"""\n', [(1, "x, y"), (2, 'say "hi"')]),
        ('a,b\n1,5" pipe\n2,"x\ny"\n', [(1, '5" pipe'), (2, "x\ny")]),
        ("a,b\n1,2.5\n3,1e3\n", [(1, 2.5), (3, 1000.0)]),
        ("a,b\n1,x\\\n3,#y\n", [(1, "x\\"), (3, "#y")]),
        ('a,b\n1,"1,000"\n', [(1, "1,000")]),
        ("a,b\n1,true\n2,False\n", [(1, True), (2, False)]),
        ("a,b\n", []),
    ],
)
def test_a_field_belongs_to_the_column_above_it(tmp_path, text, rows):
    (tmp_path / "x.csv").write_bytes(text.encode())
    table = read_frame(tmp_path / "x.csv")
    assert [*table.columns] == ["a", "b"]
    assert list(table.itertuples(index=False, name=None)) == rows


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "a,b\n1,2\n3,4,5\n",
            r"x.csv, line 3: expected 2 fields, as in the first row, got 3: '3,4,5'",
        ),
        ("a,b\n3,4,5\n1,2\n", "line 2: expected 2 fields"),
        ("a,b\n1,2\n\n3\n", "line 4: expected 2 fields, .* got 1: '3'"),
        ('a,b\n"1\n1",2\n3\n', "line 4: expected 2 fields"),
        ("a,b\nx\ry,2\n", "line 2: expected 2 fields, .* got 1: 'x'"),
        ("a,,b\n1,2,3\n", "expected a name for each column, got none for column 2"),
        ("a,b,a\n1,2,3\n", "expected columns of different names, got 'a' twice"),
        ("a;b\n1;2\n", "expected names with commas between them, got 'a;b'"),
        ("a\tb\n1\t2\n", "expected names with commas between them"),
        ('a,b\n1,"2\n3,4\n', "line 4|EOF inside string|expected a table"),
        (b"a,b\n1,\xe9\n", "expected UTF-8 text, got byte 0xe9 .*; convert it"),
        ("a,b\n1,2\n".encode("utf-16"), "expected UTF-8 text, got byte 0xff"),
        (b"\x1f\x8b\x08\x00", "expected UTF-8 text, got byte 0x8b"),
    ],
)
def test_rows_that_do_not_fit_their_header_are_refused(tmp_path, text, message):
    (tmp_path / "x.csv").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(DataError, match=message):
        read_frame(tmp_path / "x.csv")


@pytest.mark.parametrize("header", [",a", "Unnamed: 0,a", ",Unnamed: 0,a"])
def test_an_index_that_pandas_wrote_is_no_column(tmp_path, header):
    (tmp_path / "x.csv").write_text(f"{header}\n" + "".join(f"7,{'5,' * header.count(',')}\n" * 2))
    table = read_frame(tmp_path / "x.csv")
    assert [*table.columns] == ["a"]
    assert table.index.tolist() == [7, 7]
    assert table["a"].tolist() == [5, 5]


def test_a_text_may_be_long(tmp_path):
    write_frame(pandas.DataFrame({"a": ["x" * 200_000], "b": [1]}), tmp_path / "x.csv")
    before = csv.field_size_limit()
    assert read_frame(tmp_path / "x.csv")["a"].str.len().tolist() == [200_000]
    assert csv.field_size_limit() == before


def test_a_pipe_is_refused_rather_than_waited_for(tmp_path):
    os.mkfifo(tmp_path / "x.csv")
    with pytest.raises(DataError, match=r"x.csv: expected a file, which is read twice, got a pipe"):
        read_frame(tmp_path / "x.csv")


def test_a_torn_archive_is_refused(tmp_path):
    write_frame(pandas.DataFrame({"a": range(9999)}), tmp_path / "x.csv.gz")
    whole = (tmp_path / "x.csv.gz").read_bytes()
    (tmp_path / "x.csv.gz").write_bytes(whole[:-20])
    with pytest.raises(DataError, match=r"x.csv.gz: expected a table, got "):
        read_frame(tmp_path / "x.csv.gz")


def test_rows_without_a_header_are_known_by_their_position(tmp_path):
    (tmp_path / "x.csv").write_text("5\n\n7\n")
    column = read_frame(tmp_path / "x.csv", has_header=False)["0"]
    assert column.isna().tolist() == [False, True, False]
    (tmp_path / "x.csv").write_text("5,6\n\n7,8\n")
    with pytest.raises(DataError, match="line 2: expected 2 fields"):
        read_frame(tmp_path / "x.csv", has_header=False)


def test_a_header_of_one_word_for_all_features_names_each(tmp_path):
    header = "user_id,item_id,timestamp,state_label,comma_separated_list_of_features"
    (tmp_path / "x.csv").write_text(f"{header}\n0,0,0.0,0,0.5,1.5\n")
    table = read_frame(tmp_path / "x.csv")
    assert [*table.columns] == [*header.split(",")[:4], "feature_0", "feature_1"]
    assert table.iloc[0].tolist() == [0, 0, 0, 0, 0.5, 1.5]
    (tmp_path / "x.csv").write_text(f"{header}\n0,0,0.0,0,0.5,1.5\n0,0,0.0,0,0.5\n")
    with pytest.raises(DataError, match="line 3: expected 6 fields"):
        read_frame(tmp_path / "x.csv")


def test_an_index_of_parquet_is_a_column(tmp_path):
    pytest.importorskip("pyarrow", reason="Parquet is read by pyarrow")
    pandas.DataFrame({"a": [5, 6], "b": [7, 8]}).set_index("a").to_parquet(tmp_path / "x.parquet")
    assert [*read_frame(tmp_path / "x.parquet").columns] == ["a", "b"]


def test_texts_with_a_carriage_return_are_read_as_written(tmp_path):
    table = pandas.DataFrame({"id": ["a\rb", "c"], "score": [0.5, 1.5]})
    write_frame(table, tmp_path / "x.csv")
    assert read_frame(tmp_path / "x.csv", ids=["id"])["id"].tolist() == ["a\rb", "c"]


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
