import itertools
import re
import xml.etree.ElementTree as ET
from datetime import UTC, datetime, timedelta

import pytest

from shared.training.pictures import TEXT_PT, WIDTH_IN, new_picture, save_picture, show_dates

Text = pytest.importorskip("matplotlib.text").Text
TITLE = "Seconds of a step under each of the three policies, and how many bytes it sent to others"


def begun():
    figure = new_picture(3.0)
    left, right = figure.subplots(1, 2)
    left.plot([1, 2, 3], label="ours")
    left.set_title("left", fontsize=15)
    left.set_xlabel("step", fontsize=6)
    left.text(1, 2, "note", fontsize=7)
    left.legend(fontsize=8)
    right.set_yticks([1, 2], ["one", "two"], fontsize=5)
    return figure


def text_sizes(svg):
    """Sizes in points of all texts, whose letters matplotlib draws at a hundredth of the scale."""
    scales = re.findall(r"scale\(([\d.]+) -[\d.]+\)", svg)
    assert len(scales) > 15
    return sorted({100 * float(scale) for scale in scales})


def test_all_text_has_one_size_and_the_picture_its_width(tmp_path):
    save_picture(begun(), tmp_path / "new/one.svg", TITLE)
    svg = (tmp_path / "new/one.svg").read_text()
    assert text_sizes(svg) == pytest.approx([TEXT_PT])
    assert float(ET.fromstring(svg).get("width").removesuffix("pt")) == pytest.approx(72 * WIDTH_IN)


def test_title_is_read_out_and_none_of_it_is_cut(tmp_path):
    figure = begun()
    save_picture(figure, tmp_path / "one.svg", TITLE)
    svg = ET.parse(tmp_path / "one.svg").getroot()
    assert svg.find("{http://www.w3.org/2000/svg}title").text == TITLE
    figure.draw_without_rendering()
    assert figure.get_suptitle().split() == TITLE.split()
    (drawn,) = [text for text in figure.findobj(Text) if text.get_text() == figure.get_suptitle()]
    title = drawn.get_window_extent()
    assert 0 <= title.x0 < title.x1 <= figure.bbox.x1
    assert title.width > 0.7 * figure.bbox.width, "lines are broken no sooner than they must"


def test_same_picture_gives_the_same_bytes(tmp_path):
    for folder in ("a", "b"):
        save_picture(begun(), tmp_path / folder / "one.svg", TITLE)
    assert (tmp_path / "a/one.svg").read_bytes() == (tmp_path / "b/one.svg").read_bytes()


def test_other_formats_are_written_too(tmp_path):
    save_picture(begun(), tmp_path / "one.png", TITLE)
    assert (tmp_path / "one.png").read_bytes().startswith(b"\x89PNG")


def test_time_axis_shows_dates_that_do_not_run_into_each_other(tmp_path):
    figure = new_picture(2.0)
    axes = figure.subplots()
    first = datetime(2013, 1, 1, tzinfo=UTC)
    axes.plot([first + timedelta(days=day) for day in range(40)], range(40))
    show_dates(axes)
    save_picture(figure, tmp_path / "one.svg", "Departures a day")
    figure.draw_without_rendering()
    labels = [label for label in axes.get_xticklabels() if label.get_text()]
    assert [label.get_text() for label in labels] == ["Jan", "08", "15", "22", "Feb", "08"]
    assert axes.xaxis.get_offset_text().get_text() == "2013-Feb"
    ends = [label.get_window_extent() for label in labels]
    assert all(a.x1 < b.x0 for a, b in itertools.pairwise(ends))


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("hours", [1, 5, 50, 71, 80, 119, 300, 2_000, 2_500, 9_000, 25_000, 90_000])
def test_any_span_of_time_has_a_few_dates(tmp_path, hours):
    figure = new_picture(2.0)
    axes = figure.subplots()
    first = datetime(2013, 1, 1, tzinfo=UTC)
    axes.plot([first, first + timedelta(hours=hours)], [0, 1])
    show_dates(axes)
    save_picture(figure, tmp_path / "one.svg", "Departures a day")
    assert 2 <= len(axes.get_xticklabels()) <= 9
