"""Options of a command name a table's columns; what cannot be read is told with the option."""

from dataclasses import dataclass

import pytest
import tyro

from shared.data.cli import EventOptions
from shared.errors import ConfigError, DataError

ROWS = "user,item,when,amount,note\nzoe,x,2013-01-01,1.5,a\nabe,y,2013-01-02,2.5,b\n"
NAMES = ["--src", "user", "--dst", "item", "--t", "when"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(EventOptions):
    """A command."""

    seed: int = 0


def options_of(*args):
    return tyro.cli(Options, args=list(args))


@pytest.fixture
def clicks(tmp_path):
    pytest.importorskip("pandas", reason="tables are read by pandas")
    (tmp_path / "clicks.csv").write_text(ROWS)
    return str(tmp_path / "clicks.csv")


def test_a_table_is_read_as_its_columns_are_named(clicks, capsys):
    events = options_of(*NAMES).read(clicks)
    assert events.nodes.ids.tolist() == ["zoe", "x", "abe", "y"]
    assert events.features.tolist() == [[1.5], [2.5]]
    assert "clicks.csv: 2013-01-01 00:00 to 2013-01-02 00:00 UTC" in capsys.readouterr().err
    assert len(options_of(*NAMES, "--limit", "1").read(clicks)) == 1
    two = options_of(*NAMES, "--bipartite", "--features", "amount").read(clicks)
    assert two.nodes.num_sources == 2


def test_dates_are_told_by_one_rank(clicks, capsys, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    options_of(*NAMES).read(clicks)
    assert "UTC" not in capsys.readouterr().err


def test_missing_columns_advise_an_option(clicks):
    with pytest.raises(DataError, match=r"--src user --dst item --t when$"):
        options_of().read(clicks)


@pytest.mark.parametrize(
    ("args", "text", "message"),
    [
        ([], "src,dst,t\n", "expected at least one event, got a table without rows"),
        ([], "", "expected a table, the file is empty"),
        ([], "src,dst,t\n1,2,1356998400000\n", "give --time-unit ms"),
        (["--limit", "0"], ROWS, "limit: expected 1 event or more, got 0"),
        (["--src", "dst"], ROWS, "expected three different ones"),
    ],
)
def test_what_cannot_be_read_is_told(tmp_path, args, text, message):
    pytest.importorskip("pandas", reason="tables are read by pandas")
    (tmp_path / "x.csv").write_text(text)
    with pytest.raises((DataError, ConfigError), match=message):
        options_of(*args).read(str(tmp_path / "x.csv"))


def test_a_unit_that_is_given_is_believed(tmp_path):
    pytest.importorskip("pandas", reason="tables are read by pandas")
    (tmp_path / "x.csv").write_text("src,dst,t\n1,2,1356998400000\n")
    read = {
        unit: options_of("--time-unit", unit).read(str(tmp_path / "x.csv")) for unit in ("s", "ms")
    }
    assert {unit: events.t.tolist() for unit, events in read.items()} == {
        "s": [1_356_998_400_000],
        "ms": [1_356_998_400],
    }


def test_generated_streams_need_no_file():
    assert len(options_of("--limit", "5").read("zipf:9:90")) == 5
    with pytest.raises(ConfigError, match="expected zipf:NODES:EVENTS"):
        options_of().read("zipf:9")
    with pytest.raises(ConfigError, match="time_unit: expected none, zipf:9:90 is in seconds"):
        options_of("--time-unit", "ms").read("zipf:9:90")
