"""Free cores, from readings of /proc/stat that are made up."""

import os
import time

import pytest

from shared.training import cores


def stat(*idle):
    """A reading after 100 ticks: of each core those that were idle, the last 3 waiting for a disk."""
    lines = [
        f"cpu{k} {100 - n} 0 0 {n - min(n, 3)} {min(n, 3)} 0 0 0 0 0" for k, n in enumerate(idle)
    ]
    return "cpu  1 2 3 4 5 6 7 8\n" + "\n".join(lines) + "\nintr 5\n"


START = stat(0, 0, 0).replace("100", "0")


@pytest.mark.parametrize(
    ("idle", "mine", "free"),
    [
        ((100, 100, 100), {0, 1, 2}, 3),
        ((97, 80, 95), {0, 1, 2}, 3),  # what every machine does in between
        ((100, 5, 100), {0, 1, 2}, 2),
        ((50, 55, 60), {0, 1, 2}, 2),  # the scheduler moves one busy program about
        ((0, 0, 0), {0, 1, 2}, 1),
        ((100, 0, 100), {1}, 1),
        ((100, 0, 100), {0, 1}, 1),
        ((100, 100, 100), {7, 8}, 2),  # cores that the file lacks: nothing is known
    ],
)
def test_cores_that_were_idle_are_free(tmp_path, monkeypatch, idle, mine, free):
    path = tmp_path / "stat"
    path.write_text(START)
    monkeypatch.setattr(cores, "STAT", path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: mine)
    monkeypatch.setattr(time, "sleep", lambda _: path.write_text(stat(*idle)))
    assert cores.count_free_cores() == free


def test_a_kernel_that_does_not_tell_has_all_cores_free(tmp_path, monkeypatch):
    monkeypatch.setattr(cores, "STAT", tmp_path / "none")
    assert cores.count_free_cores() == len(os.sched_getaffinity(0))


def test_a_core_without_a_tick_in_between_was_idle():
    assert cores.idle_shares(START, START, [0, 1]) == [1.0, 1.0]
    assert cores.idle_shares(START, stat(40, 70, 0), [1, 0]) == [0.7, 0.4]
