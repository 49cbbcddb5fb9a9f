"""A report that cannot be written is refused at the start, and does not end a run that goes on."""

import json
import re

import pytest

from shared.errors import ConfigError
from swift.membership.first_host import FirstHost, listen
from swift.membership.record import FailureRecord
from swift.membership.settings import Launch, Settings
from swift.membership.supervisor import Ended

ACCOUNT = {
    "epoch": 1, "rank": 0, "lost": [], "reason": "", "target": 3, "world_size": 2,
    "seconds": {}, "received_bytes": 0, "undone": 0, "is_newcomer": False,
}  # fmt: skip


def test_a_report_is_there_from_the_start_and_after_each_recovery(tmp_path):
    file = tmp_path / "folder" / "report.json"
    record = FailureRecord(file)
    assert json.loads(file.read_text()) == {"format": 1, "ended": None, "failures": []}
    record.add(ACCOUNT)
    assert len(json.loads(file.read_text())["failures"]) == 1
    record.finish("why")
    assert json.loads(file.read_text())["ended"] == "why"


def test_a_report_that_cannot_be_written_is_refused_before_anything_starts(tmp_path):
    (tmp_path / "taken").touch()
    with pytest.raises(
        ConfigError, match=r"--report .*taken/report.json: expected a file that can"
    ):
        FailureRecord(tmp_path / "taken" / "report.json")


def test_a_report_that_cannot_be_written_later_is_said_once(tmp_path, capsys):
    file = tmp_path / "folder" / "report.json"
    record = FailureRecord(file)
    file.unlink()
    file.parent.rmdir()
    file.parent.touch()
    record.add(ACCOUNT)
    record.add({**ACCOUNT, "epoch": 2})
    record.finish("")
    assert capsys.readouterr().err.count("report.json could not be written: ") == 1
    assert len(record.failures()) == 2


def test_a_recovery_that_goes_on_in_the_next_one_is_told_there_alone():
    record = FailureRecord(None)
    launch = Launch(
        script=[__file__], host=0, ranks=range(3), num_spares=3, world_size=3, heartbeat_s=60.0
    )
    settings = Settings(num_ranks=3, min_ranks=3, wait_s=60.0)
    fingerprint = {"training": {"can_shrink": False}}
    lost = Ended(None, was_ready=True, how="was killed", status=None, silent_s=0.0)
    with FirstHost(launch, settings, listen("127.0.0.1", 0), record) as host:
        for at, rank in enumerate([0, 1, 2, None, None, None]):
            host.started(f"0.{at}", rank)
        for at in range(6):
            host.said(f"0.{at}", {"kind": "ready", "fingerprint": fingerprint})
        host.gone("0.0", lost)
        host.gone("0.1", lost)
        # Its step of the first new world was done as the second loss was told.
        for epoch in (1, 2):
            host.said("0.2", {"kind": "beat", "step": 4, "epoch": epoch})
            host.said("0.2", {"kind": "recovery", "record": {**ACCOUNT, "epoch": epoch}})
        host.gone("0.2", lost)
        host.said("0.3", {"kind": "recovery", "record": {**ACCOUNT, "epoch": 3}})
    assert [one["epoch"] for one in record.failures()] == [2, 3]


def test_the_newest_failure_is_drawn_as_the_run_ends(tmp_path, capsys):
    picture = tmp_path / "pictures" / "failure.svg"
    FailureRecord(None, picture).finish("")
    assert not picture.exists(), "there is no failure to draw"
    record = FailureRecord(None, picture)
    for epoch, rank in [(1, 0), (2, 1), (2, 10), (2, 9)]:
        seconds = {"detect": 0.1, "join": 0.2} if epoch == 2 else {"undo": 1.0}
        record.add(
            {**ACCOUNT, "epoch": epoch, "rank": rank, "seconds": seconds, "is_newcomer": rank == 9}
        )
    record.finish("")
    texts = re.findall("<!-- (.*) -->", picture.read_text())
    rows = [text for text in texts if re.search(r"rank \d+$", text)]
    assert rows == ["rank 1", "spare, now rank 9", "rank 10"]
    assert texts[-2:] == ["detect", "join"]
    picture.unlink()
    picture.mkdir()
    record.finish("")
    assert "failure.svg could not be written: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("failure.png", "expected a file .svg, got '.png'; name it so"),
        ("taken/failure.svg", "expected a file that can be written, got .*; give another path"),
        ("folder.svg", "expected a file that can be written, got no file can be made"),
    ],
)
def test_a_picture_that_cannot_be_drawn_is_refused_before_anything_starts(tmp_path, name, told):
    (tmp_path / "taken").touch()
    (tmp_path / "folder.svg").mkdir()
    with pytest.raises(ConfigError, match=f"--picture .*{name}: {told}"):
        FailureRecord(None, tmp_path / name)
