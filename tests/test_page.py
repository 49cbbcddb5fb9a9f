"""The report page of planted demos: its parts, read by a parser, and a real browser's view of it."""

import html
import json
import math
import re
import sys
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "bench")]

from page import render_page
from shared.claims import Claim, Demo
from shared.training.pictures import TEXT_PT, WIDTH_IN, new_picture, save_picture
from summary import KINDS, Axis, claim_ratio_text, figures_text, kind_of, ratio_text, summary
from tour import known_packages, purpose_of

LONG = "an iteration of a model whose memory lies behind a link of 200 Mbit/s, against prefetch"


def claim(name, unit, ours, baseline, **changes):
    fields = {
        "baseline_name": "one stage after another, in the same process",
        "higher_is_better": False,
        "correct": True,
        "detail": "16 batches of 600; losses and memory are the same to the bit",
        "source": "planted demo",
    }
    return Claim(name=name, unit=unit, ours=ours, baseline=baseline, **(fields | changes))


CLAIMS = (
    claim(LONG, "ms", 34.2961, 121.841, kind="simulated"),
    claim("a step", "s", 0.0056798, 0.0222031),
    claim("a slow step", "s an epoch", 12.0, 9.0),
    claim("tokens of training", "tokens/s", 14616.0, 13741.0, higher_is_better=True),
    claim("bytes sent", "MB", 1.2, 4341.65),
    claim("held-out accuracy", "share", 0.63617, 0.63833, higher_is_better=True),
    claim("wrong sums", "of 1", 0.5, 0.25, higher_is_better=True, correct=False),
)


@dataclass
class Visit:
    package: str
    demo: Demo | None
    purpose: str = "Balanced training on documents of any length: all ranks finish at once"
    problems: list[str] = field(default_factory=list)
    seconds: float = 3.0
    stderr_tail: str = ""
    skipped: list[str] = field(default_factory=list)


def visit(folder, package, title="Seconds of an epoch by phase"):
    folder.mkdir()
    figure = new_picture(2.0)
    axes = figure.subplots()
    axes.plot([1, 2], label="ours", clip_path=None)
    axes.legend()
    save_picture(figure, folder / "one.svg", title)
    return Visit(package, Demo(package=package, claims=CLAIMS, figures={}, directory=folder))


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """A page of two packages with pictures and one that failed with a long line of stderr."""
    home = tmp_path_factory.mktemp("page")
    lost = Visit("lost", None, problems=["the demo ended with exit status 1"])
    lost.stderr_tail = "Error: " + "/a/very/long/path" * 30
    visits = [visit(home / "a", "first"), visit(home / "b", "second & last", "a < b"), lost]
    path = home / "index.html"
    path.write_text(render_page(visits, full=False))
    return path


class Reader(HTMLParser):
    """All elements of a page: tag, attributes, and the text within, and whether tags match."""

    VOID = ("meta", "br", "img", "link")

    def __init__(self, text):
        super().__init__()
        self.elements, self.open = [], []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        element = {"tag": tag, "text": "", "in": [one["tag"] for one in self.open], **dict(attrs)}
        self.elements.append(element)
        if tag not in self.VOID:
            self.open.append(element)

    def handle_startendtag(self, tag, attrs):
        self.elements.append({"tag": tag, "text": "", **dict(attrs)})

    def handle_endtag(self, tag):
        assert self.open.pop()["tag"] == tag

    def handle_data(self, data):
        for element in self.open:
            element["text"] += data

    def all(self, tag, cls=""):
        return [
            one for one in self.elements
            if one["tag"] == tag and (not cls or cls in (one.get("class") or "").split())
        ]  # fmt: skip


def test_summary_has_an_axis_a_kind_and_says_first_what_is_better(page):
    read = Reader(page.read_text())
    (summary,) = read.all("div", "summary")
    assert summary["text"].startswith("A higher ratio is better")
    assert [one["text"] for one in read.all("h3")] == [kind.capitalize() for kind in KINDS]
    ticks = [one["text"] for one in read.all("span", "ticks")]
    # Ratios of 0.75 to 3.91 in time, 3,620 in bytes, 0.997 and 2 in accuracy.
    assert ticks[::2] == ticks[1::2] == ["0.5125", "110100100010000", "0.512"]


def test_first_lines_count_what_went_wrong(page):
    text = " ".join(one["text"] for one in Reader(page.read_text()).all("span", "no"))
    assert text.startswith("2 not correct, 1 demo with problems")


def test_labels_and_purposes_stand_in_full(page):
    read = Reader(page.read_text())
    labels = [one["text"] for one in read.all("span", "label")]
    assert len(labels) == 2 * len(CLAIMS)
    for one in CLAIMS:
        mine = [label for label in labels if f" {one.name} " in label]
        assert len(mine) == 2
        assert all(label.endswith(f"against {one.baseline_name}") for label in mine)
        assert all(("simulated" in label) == (one.kind == "simulated") for label in mine)
    headers = [one["text"] for one in read.all("header")]
    assert len(headers) == 3
    assert all(Visit.purpose in header for header in headers)


def test_every_picture_is_there_once_with_words_for_it_and_ids_of_its_own(page):
    read = Reader(page.read_text())
    pictures = read.all("svg")
    assert [one["role"] for one in pictures] == ["img", "img"]
    titles = [one["text"] for one in read.all("title") if "svg" in one["in"]]
    assert titles == ["Seconds of an epoch by phase", "a < b"]
    ids = [one["id"] for one in read.elements if "id" in one]
    assert len(ids) == len(set(ids))
    used = re.findall(r"(?:url\(#|href=\"#)([^)\"]+)", html.unescape(page.read_text()))
    assert any(ids.count(one) for one in used)
    assert set(used) <= set(ids)


def test_page_needs_no_other_file_and_no_script(page):
    text = page.read_text()
    read = Reader(text)
    assert not read.all("script")
    assert not read.all("link")
    assert not re.findall(r"(?:src|href)=\"(?!#)", text)
    (viewport,) = [one for one in read.all("meta") if one.get("name") == "viewport"]
    assert "width=device-width" in viewport["content"]


def test_cells_name_their_columns_for_screens_without_room_for_a_table(page):
    read = Reader(page.read_text())
    heads = [one["text"] for one in read.all("th")]
    cells = [one["data-label"] for one in read.all("td")]
    assert heads == 2 * ["claim", "ours", "baseline", "ratio", "correct"]
    assert cells == 2 * len(CLAIMS) * heads[:5]


@pytest.mark.parametrize(
    ("ours", "baseline", "unit", "expected"),
    [
        (0.0056798, 0.0222031, "s", ("5.68 ms", "22.2 ms")),
        (0.2210, 6.2741, "s", ("0.221 s", "6.27 s")),
        (34.2961, 121.841, "ms", ("34.3 ms", "122 ms")),
        (2.5e-7, 3e-6, "s an epoch", ("0.250 us an epoch", "3.00 us an epoch")),
        (5400.0, 7200.0, "s", ("1.50 h", "2.00 h")),
        (4.719, 17.303, "MB", ("4.72 MB", "17.3 MB")),
        (87.0, 4346.5, "MB", ("0.0870 GB", "4.35 GB")),
        (14616.0, 13741.0, "tokens/s", ("14,600 tokens/s", "13,700 tokens/s")),
        (0.63617, 0.63833, "share", ("0.636 share", "0.638 share")),
        (0.0, 0.0, "s", ("0 s", "0 s")),
        (math.nan, 2.0, "s", ("not finite s", "2.00 s")),
        (1.0, 2.0, "", ("1.00", "2.00")),
    ],
)
def test_figures_of_a_row_have_three_digits_and_one_unit(ours, baseline, unit, expected):
    assert figures_text(claim("x", unit, ours, baseline, ratio=1.0)) == expected


def test_ratio_has_three_digits():
    assert [ratio_text(one) for one in (0.99662, 1.0, 28.391, 3618.04, math.inf)] == [
        "0.997x", "1.00x", "28.4x", "3,620x", "not finite",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("turns", "text"),
    [(None, "1.50x"), ((1.2, 2.3), "1.50x"), ((0.041, 3.2), "1.50x (0.0410-3.20)")],
)
def test_ratio_has_its_range_where_turns_disagree(turns, text):
    made = claim("x", "s", 2.0, 3.0, ratio_range=turns)
    assert claim_ratio_text(made) == text
    assert f">{text}<" in summary([("adaqp", made)])


def test_every_recorded_unit_is_of_the_kind_it_says():
    lines = (ROOT / "bench/results/history.jsonl").read_text().splitlines()
    units = {json.loads(line)["unit"] for line in lines}
    found = {kind: {unit for unit in units if kind_of(unit) == kind} for kind in KINDS}
    assert found["time"] >= {"s", "ms", "h", "s an epoch", "tokens/s", "M/s", "G elements/s"}
    assert found["bytes"] == {"B", "bytes", "kB", "MB", "GB"}
    assert found["accuracy"] >= {"of 1", "nats a token", "%", "points", "mean squared error"}


@given(st.lists(st.floats(1e-9, 1e12), max_size=9))
def test_axis_holds_all_ratios_between_ticks_and_no_more_than_fit(ratios):
    axis = Axis.around(ratios)
    low, high = axis.ticks[0], axis.ticks[-1]
    assert low <= min([1.0, *ratios])
    assert high >= max([2.0, *ratios])
    assert 1.0 in axis.ticks
    assert len(axis.ticks) <= 8 or all(round(math.log10(t), 6) % 1 == 0 for t in axis.ticks)
    # No shorter axis would do.
    assert axis.ticks[1] > min([1.0, *ratios])
    assert axis.ticks[-2] < max([2.0, *ratios])
    places = [axis.percent(ratio) for ratio in sorted([low, *ratios, high])]
    assert places == sorted(places)
    assert (places[0], places[-1]) == pytest.approx((0, 100))


def test_distances_on_the_axis_are_those_of_factors():
    axis = Axis.around([0.3, 7.0])
    assert axis.ticks == (0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
    assert axis.percent(2.0) - axis.percent(1.0) == pytest.approx(
        axis.percent(10.0) - axis.percent(5.0)
    )


@pytest.mark.parametrize("package", known_packages())
def test_every_package_says_what_it_is_for_in_a_line(package):
    assert 20 < len(purpose_of(package)) < 130
    assert purpose_of("nosuchpackage") == ""


# What is drawn beyond the right edge, beside pictures, which clip what they hold.
BEYOND = """[...document.querySelectorAll("body *:not(svg *)")].filter(e =>
  e.getBoundingClientRect().right > innerWidth + 0.5 && getComputedStyle(e).clipPath == "none"
  && !e.closest("thead")).map(e => e.outerHTML.slice(0, 200))"""
SMALLEST_PX = """Math.min(...[...document.querySelectorAll("body *:not(svg *)")].filter(e =>
  [...e.childNodes].some(n => n.nodeType == 3 && n.data.trim())).map(e =>
  parseFloat(getComputedStyle(e).fontSize)))"""
WIDTHS = """[...document.querySelectorAll("svg")].map(e => e.getBoundingClientRect().width)"""
OVERLAPS = """[...document.querySelectorAll(".bars li")].filter(row => {
  const boxes = [...row.children].map(e => e.getBoundingClientRect());
  return boxes.some((a, i) => boxes.slice(i + 1).some(b => a.left < b.right - 0.5 &&
    b.left < a.right - 0.5 && a.top < b.bottom - 0.5 && b.top < a.bottom - 0.5)); }).length"""
COLUMNS = """new Set([...document.querySelectorAll("tbody tr:first-child td")].map(e =>
  Math.round(e.getBoundingClientRect().left))).size"""


@pytest.mark.browser
@pytest.mark.parametrize(("width", "columns"), [(1400, 5), (390, 1)])
def test_nothing_is_cut_small_or_wrong_on_a_screen(browser, page, width, columns):
    tab = browser.open(page, width)
    assert tab.errors() == []
    assert tab.evaluate("innerWidth") == width
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    assert tab.evaluate(BEYOND) == []
    assert tab.evaluate(OVERLAPS) == 0
    assert tab.evaluate(SMALLEST_PX) >= 12
    assert tab.evaluate(COLUMNS) == columns
    shown = tab.evaluate(WIDTHS)
    assert len(shown) == 2
    assert min(shown) / (WIDTH_IN * 72) * TEXT_PT >= 10, "text of pictures, in pixels"
    label = tab.evaluate('getComputedStyle(document.querySelectorAll("td")[1], "::before").content')
    assert label == ('"ours"' if columns == 1 else "none")
