"""What a user sees of a long job: on a terminal, in a pipe, and with progress hidden."""

import io
import re
import sys
import time

import pytest

from shared.training import progress as module
from shared.training.progress import (
    JobProgress,
    hidden_progress,
    is_progress_hidden,
    show_progress,
)


def wait_for(condition):
    limit = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.005)


@pytest.mark.parametrize(
    ("total", "is_bytes", "done", "line"),
    [
        (50, False, 12, "training: 12 of 50 (24%)"),
        (5000, False, 1000, "training: 1,000 of 5,000 (20%)"),
        (0, False, 0, "training: 0 of 0"),
        (None, False, 0, "training"),
        (None, False, 1234, "training, 1,234 done"),
        (4 << 20, True, 1 << 20, "training: 1.00 MiB of 4.00 MiB (25%)"),
        (None, True, 1 << 20, "training, 1.00 MiB done"),
    ],
)
def test_a_line_tells_text_count_and_share(total, is_bytes, done, line):
    progress = JobProgress("training", total, is_bytes=is_bytes)
    progress.advance(done)
    assert progress.describe() == line


def test_steps_add_up_and_texts_stay_until_they_are_replaced():
    progress = JobProgress("reading", 10)
    progress.advance()
    progress.advance(3, "training")
    assert progress.describe() == "training: 4 of 10 (40%)"
    progress.reach(9)
    assert progress.describe() == "training: 9 of 10 (90%)"
    progress.update("evaluating")
    assert (progress.text, progress.done) == ("evaluating", 9)


def test_ten_seconds_lie_between_lines():
    assert module.LINE_EVERY_S == 10


def test_in_a_pipe_lines_come_while_a_step_lasts_and_at_the_end(capsys, monkeypatch):
    monkeypatch.setattr(module, "LINE_EVERY_S", 0.02)
    lines = []
    with show_progress("training", 3) as progress:
        progress.advance()
        # One step that takes long: nothing calls the display meanwhile.
        wait_for(lambda: lines.append(capsys.readouterr().err) or sum(map(len, lines)) > 60)
        progress.advance(2)
    lines.append(capsys.readouterr().err)
    told = "".join(lines).splitlines()
    assert len(told) >= 3
    assert all(re.fullmatch(r"training: 1 of 3 \(33%\), [\d.]+ m?s", line) for line in told[:2])
    assert re.fullmatch(r"training: 3 of 3 \(100%\), [\d.]+ m?s", told[-1])


def test_a_short_job_prints_nothing_in_a_pipe(capsys):
    with show_progress("training", 3) as progress:
        progress.advance(3)
    assert capsys.readouterr() == ("", "")


def fail_after_a_line(capsys):
    with show_progress("training", 3) as progress:
        wait_for(lambda: capsys.readouterr().err)
        progress.update("after the end")
        raise ValueError("broken")


def test_a_job_that_fails_is_not_told_to_be_over(capsys, monkeypatch):
    monkeypatch.setattr(module, "LINE_EVERY_S", 0.5)
    with pytest.raises(ValueError, match="broken"):
        fail_after_a_line(capsys)
    assert capsys.readouterr().err == ""


class Terminal(io.StringIO):
    def isatty(self):
        return True


def shown_on_a_terminal(monkeypatch, total, **options):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    with show_progress("training", total, **options) as progress:
        progress.advance(1, "loss 0.5")
    return re.sub(r"\x1b\[[^a-zA-Z]*[a-zA-Z]", "", terminal.getvalue())


def test_a_terminal_has_a_bar_with_text_and_count(monkeypatch):
    shown = shown_on_a_terminal(monkeypatch, 3)
    assert re.search(r"loss 0\.5 .*1/3", shown)


def test_a_terminal_has_bytes_in_units(monkeypatch):
    assert re.search(r"loss 0\.5 .*1/3 bytes", shown_on_a_terminal(monkeypatch, 3, is_bytes=True))


def test_a_terminal_has_a_text_where_no_total_is_known(monkeypatch):
    shown = shown_on_a_terminal(monkeypatch, None)
    assert "loss 0.5" in shown
    assert "/" not in shown


def test_hidden_progress_is_hidden_everywhere_and_only_within(capsys, monkeypatch):
    assert not is_progress_hidden()
    with hidden_progress(False):
        assert not is_progress_hidden()
    with hidden_progress():
        assert is_progress_hidden()
        with hidden_progress(False):
            assert is_progress_hidden()
        assert shown_on_a_terminal(monkeypatch, 3) == ""
    assert not is_progress_hidden()
    assert shown_on_a_terminal(monkeypatch, 3, is_shown=False) == ""
