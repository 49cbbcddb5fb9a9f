import logging

from qsync.runtime.drift import DriftWatch


def test_steps_five_per_cent_too_long_for_fifty_are_reported_once(caplog):
    watch = DriftWatch(1.0)
    with caplog.at_level(logging.WARNING):
        for _ in range(49):
            watch.record(1.06)
        assert not caplog.records
        watch.record(1.06)
        watch.record(1.06)
    assert watch.is_drifting
    assert len(caplog.records) == 1
    assert "call `replan` on all ranks" in caplog.text
    for _ in range(26):
        watch.record(1.0)
    assert not watch.is_drifting


def test_few_long_steps_are_no_drift(caplog):
    watch = DriftWatch(1.0)
    for step in range(200):
        watch.record(9.0 if step % 3 == 0 else 1.04)
    assert not watch.is_drifting
    assert not caplog.records
