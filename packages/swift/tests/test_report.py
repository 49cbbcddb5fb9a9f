from swift import report
from swift.report import RecoveryReport


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
