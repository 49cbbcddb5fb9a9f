import re

import pytest

from shared.errors import DataError
from swift import report
from swift.report import PHASES, RecoveryReport, describe_failures


def test_detection_begins_with_the_earliest_sign_of_a_loss(monkeypatch):
    now = [50.0]
    monkeypatch.setattr(report.time, "monotonic", lambda: now[0])
    found = RecoveryReport()
    lost = [
        {"rank": at, "how": "", "host": 0, "since_s": since_s}
        for at, since_s in [(1, 49.5), (2, 48.0)]
    ]
    found.begin(1, 0, lost, is_newcomer=False)
    now[0] = 50.25
    found.end("join")
    found.decide("", 3, 2, 0, 0)
    record = found.complete()
    assert record["seconds"] == {"detect": 2.0, "join": 0.25, "repeat": 0.0}
    assert record["lost"] == [{"rank": 1, "how": ""}, {"rank": 2, "how": ""}]


def test_a_failure_is_told_in_a_paragraph():
    seconds = {phase: 0.1 * at for at, phase in enumerate(PHASES, 1)}
    one = {"seconds": seconds, "received_bytes": 3_000_000, "undone": 2, "is_newcomer": False}
    failure = {
        "lost": [{"rank": 2, "how": "was killed by signal 9 (SIGKILL)"}],
        "reason": "all go to version 7",
        "target": 7,
        "world_size": 3,
        "ranks": {"0": one, "1": {**one, "seconds": {**seconds, "undo": 1.5}, "undone": 1}},
    }
    assert describe_failures([failure]) == (
        "rank 2 was killed by signal 9 (SIGKILL): all go to version 7. On with step 7 and 3 ranks. "
        "detect 100 ms, join 200 ms, undo 1.50 s, transfer 400 ms, verify 500 ms, repeat 600 ms; "
        "5.72 MiB moved, 3 parameters undone."
    )
    assert describe_failures([]) == "no rank was lost"


def test_a_rank_draws_its_newest_failure(tmp_path):
    found = RecoveryReport()
    with pytest.raises(DataError, match="expected a failure to draw, got none"):
        found.draw(tmp_path / "none.svg")
    for rank in (1, 2):
        found.begin(rank, 0, [{"rank": rank, "how": "", "since_s": 0.0}], is_newcomer=rank == 2)
        for phase in PHASES[1:-1]:
            found.end(phase)
        found.decide("", 3, 2, 0, 0)
        found.complete()
    found.draw(tmp_path / "failure.svg")
    texts = re.findall("<!-- (.*) -->", (tmp_path / "failure.svg").read_text())
    assert [one for one in texts if re.search(r"rank \d$", one)] == ["spare, now rank 0"]
    assert "seconds after the loss" in texts
