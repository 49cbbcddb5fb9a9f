import itertools
import json
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from bytecheckpoint.ranks.trace import Span
from bytecheckpoint.tools.report import draw_heat, make_chrome_trace, parse_spans, sum_stages
from shared.errors import DataError


def save_spans(num_ranks, slow_rank=None):
    random = np.random.default_rng(0)
    spans = []
    for rank in range(num_ranks):
        at = 0.0
        for stage, typical, num_bytes in [
            ("plan", 0.02, 0),
            ("stage", 0.08, 10**8),
            ("checksum", 0.01, 10**8),
            ("write", 0.6, 10**8),
            ("sync", 0.1, 0),
            ("commit", 0.01, 0),
        ]:
            seconds = typical * random.uniform(0.8, 1.2)
            seconds *= 3 if (rank, stage) == (slow_rank, "write") else 1
            spans.append(Span(stage, rank, at, seconds, num_bytes))
            at += seconds
    return spans


def test_stages_come_in_the_order_of_the_work_with_seconds_that_overlap_counted_once():
    spans = [
        Span("write", 1, 1.0, 2.0, 10),
        Span("write", 1, 2.0, 3.0, 20),
        Span("write", 1, 7.0, 1.0, 5),
        Span("zeal", 0, 0.0, 0.5, 0),
        Span("plan", 0, 0.0, 0.25, 0),
    ]
    plan, write, zeal = sum_stages(spans)
    assert (plan.stage, write.stage, zeal.stage) == ("plan", "write", "zeal")
    assert write.ranks.tolist() == [0, 1]
    assert write.seconds.tolist() == [0.0, 5.0]
    assert (write.num_bytes, write.slowest) == (35, 1)


def test_chrome_trace_has_what_the_format_asks_for():
    spans = [Span("write", 2, 0.5, 1.0, 10**9), Span("write", 2, 1.0, 1.0, 0), *save_spans(2)]
    trace = json.loads(json.dumps(make_chrome_trace(spans), allow_nan=False))
    events = trace["traceEvents"]
    assert len([event for event in events if event["ph"] == "X"]) == len(spans)
    by_thread = {}
    for event in events:
        assert {"name", "ph", "pid"} <= set(event)
        if event["ph"] == "X":
            assert event["dur"] >= 0
            by_thread.setdefault((event["pid"], event["tid"]), []).append(event)
    for mine in by_thread.values():
        mine.sort(key=lambda event: event["ts"])
        for one, other in itertools.pairwise(mine):
            assert one["ts"] + one["dur"] <= other["ts"] + 1e-6
    names = {e["args"]["name"] for e in events if e["name"] == "thread_name" and e["pid"] == 2}
    assert names == {"write 1", "write 2"}
    assert {e["args"]["name"] for e in events if e["name"] == "process_name"} == {
        *("rank 0", "rank 1", "rank 2")
    }
    first = next(e for e in events if e["ph"] == "X" and e["pid"] == 2)
    assert (first["ts"], first["dur"], first["args"]["GB/s"]) == (0.5e6, 1e6, 1.0)


@pytest.mark.parametrize("num_ranks", [4, 1000])
def test_heat_table_names_the_straggler(tmp_path, num_ranks):
    slow = num_ranks * 2 // 3
    draw_heat(save_spans(num_ranks, slow), "step 100", tmp_path / "heat.svg")
    text = (tmp_path / "heat.svg").read_text()
    ElementTree.fromstring(text)
    # matplotlib writes each text it draws as a comment beside its outlines.
    assert f"rank {slow}" in text
    assert "write" in text
    assert "step 100" in text
    assert ("slowest of 25 ranks" in text) == (num_ranks == 1000)
    assert len(text) < 2_000_000


def test_stored_spans_are_read_and_checked():
    assert parse_spans([["write", 3, 0.5, 1, 7]]) == [Span("write", 3, 0.5, 1.0, 7)]
    for bad in ("x", [["write", 3, 0.5]], [["write", 3, 0.5, -1.0, 0]], [[1, 2, 3.0, 4.0, 5]]):
        with pytest.raises(DataError):
            parse_spans(bad)
    with pytest.raises(DataError, match="saved without a trace"):
        draw_heat([], "nothing", Path("unused.svg"))
