"""Rows to score are read as a run's own data were, and nothing that is read is written over."""

import json
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from shared.data.cli import EventOptions
from shared.data.prediction import PredictOptions, save_run
from shared.errors import DataError

pandas = pytest.importorskip("pandas", reason="tables are read by pandas")

VISITS = """user,item,when,amount
u1,apple,2024-05-01T09:00:00,1.5
u2,bread,2024-05-01T10:00:00,2.5
u1,bread,2024-05-01T11:00:00,0.5
"""
NEW = """item,user,when
bread,u2,2024-05-03T00:00:00
apple,zoe,2024-05-03T00:00:00
apple,u1,2024-05-02T00:00:00.500
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Train(EventOptions):
    """A command that trains."""

    data: str
    sizes: tuple[int, ...] = (3, 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Other(EventOptions):
    """Another command, with other options."""


@pytest.fixture
def folder(tmp_path):
    """With data, rows to score, and a run."""
    (tmp_path / "visits.csv").write_text(VISITS)
    (tmp_path / "new.csv").write_text(NEW)
    train(tmp_path)
    return tmp_path


def train(folder, **options):
    names = {"src": "user", "dst": "item", "t": "when"}
    command = Train(data=str(folder / "visits.csv"), **(names | options))
    save_run(folder / "run", "train", command, command.data, command.read(command.data))
    return command


def options_of(folder, **changes):
    given = {"data": str(folder / "new.csv"), "run": folder / "run", "out": folder / "scores.csv"}
    return PredictOptions(**(given | changes))


def read(folder, **changes):
    options = options_of(folder, **changes)
    run = options.open_run({"train": Train})
    return options.read_queries(run, run.command.read(run.data))


def rewrite(path, before, after):
    text = path.read_text()
    assert before in text
    path.write_text(text.replace(before, after))


def test_a_run_is_found_with_its_options(tmp_path):
    (tmp_path / "visits.csv").write_text(VISITS)
    rows = tmp_path / "rows.npy"
    command = Train(data=str(tmp_path / "visits.csv"), src="user", dst="item", t="when", limit=2)
    events = command.read(command.data)
    save_run(tmp_path / "run", "train", replace(command, edge_features=rows), command.data, events)
    found = options_of(tmp_path).open_run({"other": Other, "train": Train})
    assert found.command == replace(command, edge_features=rows)
    assert found.data == command.data
    assert (tmp_path / "run" / "nodes.csv").read_text() == "node,id\n0,u1\n1,apple\n2,u2\n3,bread\n"


def test_rows_whose_ends_are_known_are_scored_by_time(folder, capsys):
    queries = read(folder)
    assert [*queries.table.columns] == ["user", "item", "when"]
    assert queries.rows.tolist() == [2, 0]
    assert queries.events.src.tolist() == [0, 2]
    assert queries.events.dst.tolist() == [1, 3]
    # Half a second past midnight: what is earlier than that is earlier than the next whole second.
    assert queries.events.t.tolist() == [1_714_608_001, 1_714_694_400]
    assert "new.csv: 2024-05-02 00:00 to 2024-05-03 00:00 UTC" in capsys.readouterr().err
    options_of(folder).write_scores(queries, torch.tensor([0.25, 0.75]))
    told = "rows without a score, as the run has not seen their ids: 1"
    assert capsys.readouterr().out == f"scores of 2 rows: {folder}/scores.csv\n{told}\n"
    written = pandas.read_csv(folder / "scores.csv")
    assert written["score"].fillna(-1).tolist() == [0.75, -1, 0.25]
    assert written["user"].tolist() == ["u2", "zoe", "u1"]


def test_columns_may_be_called_otherwise(folder):
    (folder / "new.csv").write_text("thing,user,when\nbread,u2,2024-05-03\n")
    with pytest.raises(DataError, match=r"expected columns 'user', 'item' and 'when', got \['thin"):
        read(folder)
    assert read(folder, dst="thing").events.dst.tolist() == [3]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "new.csv: expected a table, the file is empty"),
        ("item,user,when\n", "new.csv: .* got a table without rows; check the columns"),
        (
            "item,user,when\nbread,zoe,2024-05-03\n",
            "new.csv: expected ids of the data .* got 1 row",
        ),
        ("item,user,when\nbread,,2024-05-03\n", "new.csv: user of row 0: expected an id, got none"),
        ("item,user,when\nbread,u1,May\n", "new.csv: when of row 0: expected numbers or dates"),
    ],
)
def test_rows_that_cannot_be_scored_are_told(folder, text, message):
    (folder / "new.csv").write_text(text)
    with pytest.raises(DataError, match=message):
        read(folder)


def test_texts_are_none_of_a_run_of_numbers(folder):
    (folder / "visits.csv").write_text("user,item,when\n0,1,5\n2,3,6\n")
    train(folder)
    (folder / "new.csv").write_text("user,item,when\n2,1,7\n2,9,7\n")
    assert read(folder).rows.tolist() == [0]
    (folder / "new.csv").write_text("user,item,when\n2,x,7\n")
    with pytest.raises(
        DataError, match="item: expected whole numbers, as the run's ids are, got t"
    ):
        read(folder)


def test_ids_are_the_users_own(folder):
    (folder / "visits.csv").write_text("user,item,when\n007,NA,5\n7,1,6\n")
    train(folder)
    (folder / "new.csv").write_text("user,item,when\n7,1,9\n007,NA,9\n")
    queries = read(folder)
    assert queries.events.src.tolist() == [2, 0]
    assert queries.table["user"].tolist() == ["7", "007"]
    (folder / "new.csv").write_text("user,item,when\n7,1,9\n")  # alone they look like numbers
    assert read(folder).events.src.tolist() == [2]


# -- times ----------------------------------------------------------------------------------


def test_milliseconds_are_not_taken_for_seconds(folder):
    (folder / "new.csv").write_text("item,user,when\nbread,u2,1714694400000\n")
    with pytest.raises(
        DataError, match=r"new.csv: times: expected seconds, .* give --time-unit ms"
    ):
        read(folder)
    assert read(folder, time_unit="ms").events.t.tolist() == [1_714_694_400]
    given = read(folder, time_unit="s").events.t.tolist()
    assert given == [1_714_694_400_000], "a unit that is given is believed"


def test_rows_have_the_unit_of_the_run_unless_they_are_dates(folder):
    (folder / "visits.csv").write_text("user,item,when\nu1,apple,1714608000000\n")
    train(folder, time_unit="ms")
    (folder / "new.csv").write_text("user,item,when\nu1,apple,1714694400000\n")
    assert read(folder).events.t.tolist() == [1_714_694_400]
    (folder / "new.csv").write_text("user,item,when\nu1,apple,1714694400\n")
    assert read(folder, time_unit="s").events.t.tolist() == [1_714_694_400]
    (folder / "new.csv").write_text("user,item,when\nu1,apple,2024-05-03\n")
    assert read(folder).events.t.tolist() == [1_714_694_400]
    with pytest.raises(DataError, match="dates need no unit, leave the option out"):
        read(folder, time_unit="s")


# -- the run --------------------------------------------------------------------------------


def test_a_folder_without_a_run_is_told(folder):
    message = "run.json: expected the folder of a run that has ended, there is no such file"
    with pytest.raises(DataError, match=message):
        read(folder, run=folder)


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ('"train"', '"fit"', "expected a run of train of this version, got one of 'fit'"),
        (
            "meshyard run 1",
            "2",
            "expected a run .*, got one of 'train' in the format '2'; train again",
        ),
        ('"sizes"', '"widths"', "expected a run of train of this version"),
        (
            '"command"',
            '"name"',
            r"expected a run's options, got KeyError\('command'\); train again",
        ),
        ("{", "", "expected a run's options"),
    ],
)
def test_a_run_of_something_else_is_told(folder, before, after, message):
    rewrite(folder / "run" / "run.json", before, after)
    with pytest.raises(DataError, match=f"run.json: {message}"):
        read(folder)


@pytest.mark.parametrize(
    ("before", "after"), [("0.5", "0.75"), ("T09", "T08"), ("u2", "u3"), ("u2,bread", "u2,apple")]
)
def test_data_that_have_changed_are_told(folder, before, after):
    rewrite(folder / "visits.csv", before, after)
    message = f"run: expected the events that the run learnt from, {folder}/visits.csv has changed"
    with pytest.raises(DataError, match=message):
        read(folder)


def test_data_that_are_gone_are_told(folder):
    (folder / "visits.csv").unlink()
    with pytest.raises(DataError, match=r"visits.csv: expected a file or folder, there is nothing"):
        read(folder)


# -- the table to write ---------------------------------------------------------------------


@pytest.mark.parametrize("name", ["new.csv", "run/../visits.csv", "run/nodes.csv", "link.csv"])
def test_what_is_read_is_not_written_over(folder, name, monkeypatch):
    (folder / "link.csv").symlink_to(folder / "visits.csv")
    monkeypatch.chdir(folder)
    message = (
        r"expected a table of its own to write, got one that would replace .*\.csv, which is r"
    )
    with pytest.raises(DataError, match=message):
        options_of(folder, out=Path(name)).open_run({"train": Train})


def test_scores_may_lie_beside_what_is_read(folder):
    for out in ("scores.csv", "run/scores.csv", "run/new.csv"):
        assert options_of(folder, out=folder / out).open_run({"train": Train}).data


def test_edge_features_are_not_written_over(folder):
    about = json.loads((folder / "run" / "run.json").read_text())
    about["options"]["edge_features"] = {"path": str(folder / "rows.csv")}
    (folder / "run" / "run.json").write_text(json.dumps(about))
    with pytest.raises(DataError, match=r"would replace .*rows.csv"):
        options_of(folder, out=folder / "rows.csv").open_run({"train": Train})


def test_what_is_no_table_is_told_before_the_work(folder):
    with pytest.raises(DataError, match=r"expected a table named .parquet, .csv"):
        options_of(folder, out=folder / "scores.txt").open_run({"train": Train})
