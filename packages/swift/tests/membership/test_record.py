"""A report that cannot be written is refused at the start, and does not end a run that goes on."""

import json

import pytest

from shared.errors import ConfigError
from swift.membership.record import FailureRecord

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
