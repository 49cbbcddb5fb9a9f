"""The picture and the page show what rounds say; the bar is there where a terminal is."""

import base64
import re
from xml.etree import ElementTree

import pytest

from gnnflow.training.report import describe_round, draw, write_page
from gnnflow.training.rounds import Round
from shared.errors import ConfigError, DataError


def some_rounds(start=1_357_000_000, ap=0.8):
    return [
        Round(
            index=i,
            time=start + 86_400 * i,
            num_events=100 * i,
            num_replayed=50,
            loss=1.0,
            ap=ap,
            auc=0.5,
            mrr=0.4,
            train_s=0.25,
            fetch_s=0.5,
        )
        for i in range(1, 5)
    ]


def texts(path):
    # matplotlib draws letters as outlines and leaves the text in comments.
    return re.findall(r"<!-- (.*?) -->", path.read_text())


def test_draw_shows_each_run_its_stages_and_dates(tmp_path):
    path = tmp_path / "a.svg"
    curves = {"tgat": some_rounds(), "monthly": some_rounds(ap=0.6)}
    draw(curves, path, title="a year", is_unix_time=True)
    ElementTree.parse(path)
    found = texts(path)
    for text in ("a year", "average precision", "insert", "evaluate", "sample", "fetch", "train"):
        assert text in found
    assert found.count("tgat") == found.count("monthly") == 2
    assert any(re.match(r"(2013-)?01-0\d", text) for text in found)
    draw({"one": some_rounds()}, path, metric="mrr")
    assert "mean reciprocal rank" in texts(path)


def test_draw_of_a_single_round_is_a_picture(tmp_path):
    draw({"one": some_rounds()[:1]}, tmp_path / "a.svg")
    ElementTree.parse(tmp_path / "a.svg")


def test_draw_refuses(tmp_path):
    with pytest.raises(ConfigError, match="metric: expected one of"):
        draw({"one": some_rounds()}, tmp_path / "a.svg", metric="loss")
    with pytest.raises(ConfigError, match="at most 5 runs, got 6"):
        draw({str(i): some_rounds() for i in range(6)}, tmp_path / "a.svg")
    for curves in ({}, {"one": []}):
        with pytest.raises(DataError, match="at least one run"):
            draw(curves, tmp_path / "a.svg")
    assert not (tmp_path / "a.svg").exists()


def test_page_is_whole_and_escapes_what_users_say(tmp_path):
    page = write_page(
        {"<tgat>": some_rounds()}, tmp_path / "out", title="1 < 2", about={"every": "1D & more"}
    )
    text = page.read_text()
    assert "1 &lt; 2" in text
    assert "1D &amp; more" in text
    assert "<tgat>" not in text
    source = re.search(r"base64,([^\"]*)", text)[1]
    assert base64.b64decode(source) == (tmp_path / "out" / "continual.svg").read_bytes()
    cells = re.findall(r"<td>(.*?)</td>", text)
    expected = ["&lt;tgat&gt;", "4", "1,000", "200", "0.8000", "0.0", "0.0", "0.0", "2.0", "1.0"]
    assert cells[:10] == expected


def test_a_rounds_line_tells_rate_and_score():
    # 100 new and 50 replayed events in 0.75 s.
    line = describe_round(some_rounds()[0], "ap")
    assert line == "round 1, 200 events/s, ap 0.800, events"
