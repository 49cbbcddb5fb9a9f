"""Events come out of each kind of file and folder as they went in; what is unusable is named."""

import errno
import logging

import numpy as np
import pytest

from shared.data.formats import read_events
from shared.errors import DataError

pandas = pytest.importorskip("pandas", reason="tables are read by pandas")


def table(**changes):
    columns = {"src": [3, 1, 2], "dst": [4, 5, 6], "t": [30, 10, 20], "w": [0.5, 1.5, 2.5]}
    return pandas.DataFrame(columns | changes)


@pytest.mark.parametrize("suffix", [".csv", ".csv.gz", ".parquet"])
def test_tables_are_read_by_time(tmp_path, suffix):
    path = tmp_path / f"events{suffix}"
    if suffix == ".parquet":
        pytest.importorskip("pyarrow", reason="Parquet is read by pyarrow")
        table().to_parquet(path)
    else:
        table().to_csv(path, index=False)
    events = read_events(path)
    assert events.src.tolist() == [1, 2, 3]
    assert events.dst.tolist() == [5, 6, 4]
    assert events.t.tolist() == [10, 20, 30]
    assert events.eid.tolist() == [1, 2, 0]
    assert events.features.tolist() == [[1.5], [2.5], [0.5]]
    assert events.label == path.name


def test_read_events_refuses(tmp_path):
    with pytest.raises(DataError, match="there is nothing; check the path"):
        read_events(tmp_path / "none.csv")
    (tmp_path / "events.txt").write_text("a")
    with pytest.raises(
        DataError, match=r"expected a table named .parquet, .csv, .csv.gz, got '.txt'"
    ):
        read_events(tmp_path / "events.txt")
    (tmp_path / "events.csv").write_text("a,b\n1,2\n")
    with pytest.raises(DataError, match=r"events.csv: expected columns 'src', 'dst' and 't'"):
        read_events(tmp_path / "events.csv")
    (tmp_path / "events.csv").write_text("")
    with pytest.raises(DataError, match=r"events.csv: expected a table, the file is empty; check"):
        read_events(tmp_path / "events.csv")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"expected ml_<name>.csv or <name>_edgelist.csv"):
        read_events(tmp_path / "empty")


def test_a_folder_as_tgn_prepares_it(tmp_path):
    text = ",u,i,ts,label,idx\n0,1,4,0.0,0,1\n1,2,5,36.5,0,2\n"
    (tmp_path / "ml_toy.csv").write_text(text)
    plain = read_events(tmp_path)
    assert plain.features is None
    np.save(tmp_path / "ml_toy.npy", np.array([[0.0, 0.0], [1.0, 2.0], [3.0, 4.0]]))
    np.save(tmp_path / "ml_toy_node.npy", np.zeros((6, 2)))
    events = read_events(tmp_path)
    assert events.src.tolist() == [1, 2]
    assert events.dst.tolist() == [4, 5]
    assert events.t.tolist() == [0.0, 36.5]
    assert events.eid.tolist() == [1, 2]
    assert events.features.tolist() == [[1.0, 2.0], [3.0, 4.0]]
    np.save(tmp_path / "ml_toy.npy", np.zeros((2, 2)))
    with pytest.raises(DataError, match=r"ml_toy.npy: expected a row for each id up to 2"):
        read_events(tmp_path)
    np.save(tmp_path / "ml_toy.npy", np.array([{}], dtype=object), allow_pickle=True)
    with pytest.raises(DataError, match=r"ml_toy.npy: expected an array of numbers"):
        read_events(tmp_path)
    (tmp_path / "ml_toy.csv").write_text("u,i,ts\n1,2,3\n")
    with pytest.raises(DataError, match="expected columns u, i, ts and idx"):
        read_events(tmp_path)
    (tmp_path / "ml_other.csv").write_text(text)
    with pytest.raises(DataError, match=r"expected one ml_<name>.csv, got \['ml_other.csv'"):
        read_events(tmp_path)


def test_an_edge_list_in_jodies_form(tmp_path):
    # The form of tgbl-wiki: one header word for all features, items numbered from 0.
    (tmp_path / "tgbl-wiki_edgelist.csv").write_text(
        "user_id,item_id,timestamp,state_label,comma_separated_list_of_features\n"
        "0,0,0.0,0,0.1,0.2\n1,1,1.0,0,0.3,0.4\n"
    )
    events = read_events(tmp_path)
    assert events.src.tolist() == [0, 1]
    assert events.dst.tolist() == [2, 3]
    assert events.t.tolist() == [0.0, 1.0]
    assert events.features.numpy() == pytest.approx(np.array([[0.1, 0.2], [0.3, 0.4]]))
    assert events.label == "tgbl-wiki"


TGB = {
    "tgbl-flight_edgelist_v2.csv": "timestamp,src,dst,callsign\n1546300800,0,1,AA1\n",
    "tgbl-coin_edgelist_v2.csv": "time,src,dst,weight\n1546300800,0,1,5.5\n",
    "tgbl-comment_edgelist.csv": "ts,src,dst,subreddit,num_words,score\n1546300800,0,1,1,5,3\n",
    "tgbl-review_edgelist_v3.csv": "ts,source,target,weight\n1546300800,0,1,4.0\n",
    "tgbn-trade_edgelist.csv": "year,nation,trading nation,weight\n1546300800,0,1,4.0\n",
    "thgl-software_edgelist.csv": "timestamp,head,tail,relation_type\n1546300800,0,1,4\n",
    "quoted_edgelist.csv": '"ts","src","dst"\n1546300800,0,1\n',
    "blank_edgelist.csv": "ts, src, dst\n1546300800, 0, 1\n",
    "bom_edgelist.csv": "\ufeffsrc,dst,ts\n0,1,1546300800\n",
}


@pytest.mark.parametrize("name", TGB)
def test_edge_lists_are_read_as_the_benchmark_ships_them(tmp_path, name):
    (tmp_path / name).write_text(TGB[name])
    (tmp_path / name.replace("_edgelist", "_static_edgelist")).write_text("head,tail\n0,1\n")
    (tmp_path / "tgb_node_labels.csv").write_text("a\n1\n")
    events = read_events(tmp_path)
    assert (events.src.tolist(), events.dst.tolist()) == ([0], [1])
    assert events.t.tolist() == [1546300800]
    assert events.label == name.partition("_edge")[0]


def test_two_versions_of_one_edge_list_are_refused(tmp_path):
    for name in ("x_edgelist.csv", "x_edgelist_v2.csv"):
        (tmp_path / name).write_text("t,u,v\n7000,1,2\n")
    with pytest.raises(DataError, match=r"expected one <name>_edgelist.csv, .*; move the other"):
        read_events(tmp_path)


@pytest.mark.parametrize("item", ["genre", "subreddit", "token_address", "item_id"])
def test_items_are_other_nodes_than_users_of_the_same_number(tmp_path, item):
    (tmp_path / "x_edgelist.csv").write_text(f"ts,user_id,{item}\n1,5,5\n2,5,6\n")
    events = read_events(tmp_path)
    assert (events.src.tolist(), events.dst.tolist()) == ([0, 0], [1, 2])
    assert events.nodes.ids.tolist() == ["5", "5", "6"]


def test_an_edge_list_of_names_and_dates(tmp_path, caplog):
    # The form of tgbl-flight.
    (tmp_path / "tgbl-flight_edgelist.csv").write_text(
        "timestamp,src,dst,callsign,weight\n"
        "2019-01-02,EGLL,KJFK,BAW1,1.5\n2019-01-01,LFPG,EGLL,BAW2,2.5\n"
    )
    with caplog.at_level(logging.WARNING):
        events = read_events(tmp_path)
    assert events.src.tolist() == [2, 0]
    assert events.dst.tolist() == [0, 1]
    assert events.t.tolist() == [1_546_300_800, 1_546_387_200]
    assert events.features.tolist() == [[2.5], [1.5]]
    assert "callsign" in caplog.text


def test_codes_that_look_like_gaps_or_numbers_are_ids(tmp_path):
    rows = "NA,007,1,NA\nDE,7,2,x\n"
    (tmp_path / "trade_edgelist.csv").write_text(f"source,target,day,note\n{rows}")
    (tmp_path / "trade.csv").write_text(f"src,dst,t,note\n{rows}")
    for path in (tmp_path, tmp_path / "trade.csv"):
        assert read_events(path).nodes.ids.tolist() == ["NA", "007", "DE", "7"]


def test_an_edge_list_of_numbers_keeps_its_ids(tmp_path):
    (tmp_path / "x_edgelist.csv").write_text("day,u,v,weight\n7,10,20,1\n8,20,30,2\n")
    events = read_events(tmp_path)
    assert events.src.tolist() == [10, 20]
    assert events.dst.tolist() == [20, 30]
    assert events.t.tolist() == [7, 8]
    (tmp_path / "x_edgelist.csv").write_text("day,u,v,idx\n7,10,20,5\n8,20,30,4\n")
    events = read_events(tmp_path)
    assert events.eid.tolist() == [5, 4]
    assert events.features is None
    (tmp_path / "x_edgelist.csv").write_text("day,u,weight\n7,10,1\n")
    with pytest.raises(DataError, match=r"expected a column named one of \['dst'"):
        read_events(tmp_path)
    (tmp_path / "x_edgelist.csv").write_text("day,src,dst\nsoon,10,1\n")
    with pytest.raises(DataError, match="day of row 0: expected numbers or dates"):
        read_events(tmp_path)


def test_a_file_that_may_not_be_read_is_told_as_that(tmp_path, monkeypatch):
    path = tmp_path / "events.csv"
    table().to_csv(path, index=False)

    def refused(given, **options):
        raise PermissionError(errno.EACCES, "Permission denied", str(given))

    monkeypatch.setattr(pandas, "read_csv", refused)  # root may read everything
    with pytest.raises(DataError, match="expected a file that this user may read, got 'Permission"):
        read_events(path)


def test_columns_of_a_file_may_have_other_names(tmp_path):
    path = tmp_path / "clicks.csv"
    path.write_text("who,what,when\nzoe,x,2013-01-01T00:00:05\nabe,x,2013-01-01T00:00:00\n")
    events = read_events(path, src="who", dst="what", t="when")
    assert events.t.tolist() == [1_356_998_400, 1_356_998_405]
    assert events.nodes.ids[events.src].tolist() == ["abe", "zoe"]
    with pytest.raises(DataError, match=r"clicks.csv: expected columns .* --src COLUMN"):
        read_events(path)


def test_blanks_and_points_make_no_second_node(tmp_path):
    path = tmp_path / "x.csv"
    for text in ("1, 2, 100\n2,\t3 ,200\n3,1,300\n", "1,2,100\n2.0,3,200\n3,1.0,300\n"):
        path.write_text(f"src, dst, t\n{text}")
        events = read_events(path, dst=" dst", t="t")
        assert events.src.tolist() == [1, 2, 3]
        assert events.dst.tolist() == [2, 3, 1]


def test_fields_beyond_the_header_are_refused_with_file_and_line(tmp_path):
    (tmp_path / "x.csv").write_text("src,dst,t\n1,2,100\n2,3,200,9\n")
    with pytest.raises(DataError, match=r"x.csv, line 3: expected 3 fields"):
        read_events(tmp_path / "x.csv")


def test_a_type_of_a_column_is_that_of_all_its_rows(tmp_path):
    path = tmp_path / "long.csv"
    rows = [f"00{n % 9},{n % 5},{n}" for n in range(300_000)]
    path.write_text("\n".join(["src,dst,t", *rows, "x,1,300000"]))
    events = read_events(path)
    assert {*events.nodes.ids} == {*"01234x", *(f"00{n}" for n in range(9))}


@pytest.mark.parametrize("time_unit", [None, "ms"])
def test_a_folders_times_may_have_a_unit(tmp_path, time_unit):
    (tmp_path / "x_edgelist.csv").write_text("t,u,v\n7000,1,2\n")
    found = read_events(tmp_path, time_unit=time_unit).t.tolist()
    assert found == [7 if time_unit else 7000]
