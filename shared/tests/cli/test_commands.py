"""Statuses, messages and help of a command line, as a user in a shell meets them."""

import json
import logging
import os
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated

import pytest
from rich.table import Table

from shared.claims import Claim, finish
from shared.cli import (
    CheckpointOption,
    DemoOptions,
    JsonOption,
    choice,
    draw_table,
    read_examples,
    run_command,
)
from shared.errors import CommError, ConfigError, DataError, RankFailure
from shared.kernels import jit
from shared.registry import Registry
from shared.training.progress import is_progress_hidden

POLICIES = Registry("policy")
POLICIES.add("exact", "nowhere:Exact", "no error")
WIDTHS = Registry("width")
WIDTHS.add(2, object(), "a quarter of a byte")
WIDTHS.add(4, object(), "half a byte")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fail(CheckpointOption):
    """Ends as it is told to.

    In a way that has a second paragraph,
    whose lines are joined.

    Examples:
        yard fail --how data
        yard fail
    """

    how: str = "not"
    """What is raised."""

    def execute(self) -> int | None:
        errors = {
            "data": DataError("rows: expected 3, got 4; give 3"),
            "missing": FileNotFoundError(2, "No such file or directory", "a.csv"),
            "memory": MemoryError(),
            "interrupt": KeyboardInterrupt(),
            "fault": ZeroDivisionError("a fault of ours"),
            "full": OSError(28, "No space left on device", "/dev/full"),
            "peer": CommError("rank 1 did not answer"),
            "rank": RankFailure("rank 1 of 2 failed: Traceback ...", 1, "lr: expected less, got 9"),
            "dead": RankFailure("rank 1 of 2 failed: killed by SIGKILL", 1),
            "pipe": BrokenPipeError(32, "Broken pipe"),
        }
        if self.how in errors:
            raise errors[self.how]
        if self.how == "interrupted writer":
            try:
                raise KeyboardInterrupt
            finally:
                raise RuntimeError(
                    "[enforce fail at inline_container.cc:672] . unexpected pos 3 vs 2"
                )
        if self.how == "swallowed interrupt":
            with suppress(KeyboardInterrupt):
                os.kill(os.getpid(), signal.SIGINT)
            raise RecursionError("maximum recursion depth exceeded")
        return 1 if self.how == "differs" else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A part of the settings that refuses some."""

    layers: int = 1
    """How many."""

    def __post_init__(self) -> None:
        if self.layers < 1:
            raise ConfigError(f"model.layers: expected 1 or more, got {self.layers}; give 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Build:
    """Has settings that refuse some values."""

    model: Model
    """A part."""
    steps: int = 1
    """How many."""

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ConfigError(f"steps: expected 1 or more, got {self.steps}; give 1")

    def execute(self) -> None:
        pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Show(JsonOption):
    """Shows what was chosen."""

    policy: Annotated[str, choice(POLICIES)] = "exact"
    """Which policy."""
    widths: tuple[Annotated[int, choice(WIDTHS)], ...] = (2,)
    """Which widths."""

    def execute(self) -> None:
        curve = (0.5, float("inf"), [-float("inf")])
        record = {"policy": self.policy, "widths": self.widths, "curve": curve}
        record |= {"loss": float("nan")}
        self.print_result(record, f"{self.policy} {self.widths}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Log:
    """Logs a line, and says whether progress is shown."""

    def execute(self) -> None:
        logging.getLogger(f"{__name__.partition('.')[0]}.deep").info("chosen")
        logging.getLogger("shared.kernels").info("cpu")
        logging.getLogger("other").info("not ours")
        sys.stdout.write("hidden\n" if is_progress_hidden() else "shown\n")


def run(*argv):
    commands = {"fail": Fail, "show": Show, "build": Build, "log": Log, "compile": Compile}
    commands |= {"demo": ShowDemo}
    return run_command(commands, prog="yard", about="Does things.", argv=list(argv))


INTERRUPTED = (
    "yard: interrupted; nothing was saved: give --checkpoint DIR, and the same command can resume\n"
)


@pytest.mark.parametrize(
    ("how", "status", "message"),
    [
        ("not", 0, ""),
        ("differs", 1, ""),
        ("data", 1, "yard: rows: expected 3, got 4; give 3\n"),
        ("missing", 1, "yard: [Errno 2] No such file or directory: 'a.csv'\n"),
        ("memory", 1, "yard: MemoryError\n"),
        ("peer", 1, "yard: rank 1 did not answer\n"),
        # What a user can mend is told alone; what killed a rank is found by its report.
        ("rank", 1, "yard: lr: expected less, got 9\n"),
        ("dead", 1, "yard: rank 1 of 2 failed: killed by SIGKILL\n"),
        (
            "interrupt",
            130,
            INTERRUPTED,
        ),
        ("interrupted writer", 130, INTERRUPTED),
        # Not our output broke, but something else: that is a failure like others.
        ("pipe", 1, "yard: [Errno 32] Broken pipe\n"),
    ],
)
def test_how_a_command_ends(capfd, how, status, message):
    assert run("fail", "--how", how) == status
    assert capfd.readouterr() == ("", message)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("missing", "yard: [Errno 2] No such file or directory: 'a.csv'\n"),
        ("rank", "yard: lr: expected less, got 9\n"),
    ],
)
def test_verbose_shows_where_a_mistake_was_met(capfd, how, message):
    assert run("fail", "--how", how, "-v") == 1
    told = capfd.readouterr().err
    assert told.startswith("Traceback (most recent call last):\n")
    assert ", in execute\n    raise errors[self.how]\n" in told
    assert told.endswith(f"\n{message}")


def test_a_full_disk_is_named_with_the_bytes_free(capfd):
    assert run("fail", "--how", "full") == 1
    told = capfd.readouterr().err
    start = "yard: /dev/full: expected room on the disk for what is written there, got "
    assert told.startswith(start)
    assert told.endswith(" bytes free; free some, or write to another disk\n")
    disk = os.statvfs("/dev/full")
    free = int(told.removeprefix(start).split()[0].replace(",", ""))
    assert 0 <= free <= disk.f_blocks * disk.f_frsize


def test_an_interrupt_says_how_to_resume(capfd, tmp_path):
    folder = tmp_path / "saved"
    argv = ("fail", "--how", "interrupt", "--checkpoint", str(folder))
    told = f"yard: interrupted; {folder} has no checkpoint yet: start again by the same command\n"
    assert (run(*argv), capfd.readouterr().err) == (130, told)
    folder.mkdir()
    assert (run(*argv), capfd.readouterr().err) == (130, told)
    (folder / "state.json").touch()
    told = f"yard: interrupted; resume from {folder} by the same command\n"
    assert (run(*argv), capfd.readouterr().err) == (130, told)
    # A kill between two renames leaves the checkpoint that was about to be replaced.
    folder.rename(folder.with_name("saved.replaced"))
    assert (run(*argv), capfd.readouterr().err) == (130, told)


def test_an_interrupt_that_became_another_error_is_told_as_one(capfd):
    told = "yard: interrupted; nothing was saved: give --checkpoint DIR, and the same command can resume\n"
    assert (run("fail", "--how", "swallowed interrupt"), capfd.readouterr().err) == (130, told)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_program_that_ignores_interrupts_goes_on_ignoring_them(capfd):
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with pytest.raises(RecursionError):
            run("fail", "--how", "swallowed interrupt")
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["--model.layers", "0"], "model.layers: expected 1 or more, got 0; give 1"),
        (["--steps", "0"], "steps: expected 1 or more, got 0; give 1"),
    ],
)
def test_settings_that_are_refused_are_one_sentence_and_status_2(capfd, argv, told):
    with pytest.raises(SystemExit) as caught:
        run("build", *argv)
    assert caught.value.code == 2
    assert capfd.readouterr() == ("", f"yard: {told}\n")
    assert run("build") == 0


TOLD = """
import os
import sys
from contextlib import suppress
from dataclasses import dataclass
from shared.cli import run_command
from shared.errors import CommError, DataError

@dataclass(frozen=True)
class Fail:
    "Fails on every rank."
    def execute(self):
        # The rank that lost a message is quicker than the one whose mistake it was.
        if os.environ["RANK"] == "0":
            raise CommError("rank 1 did not answer")
        raise DataError("rows: expected 3, got 4; give 3")

if __name__ == "__main__":
    sys.exit(run_command({"fail": Fail, "other": Fail}, prog="yard", about="Fails."))
"""


@pytest.mark.slow
def test_of_torchruns_ranks_one_tells_what_is_to_be_mended(tmp_path):
    (tmp_path / "yard.py").write_text(TOLD)
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3",
         tmp_path / "yard.py", "fail"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    ours = [line for line in done.stderr.splitlines() if line.startswith("yard:")]
    assert ours == ["yard: rows: expected 3, got 4; give 3"], done.stderr


def test_a_fault_of_ours_keeps_its_traceback():
    with pytest.raises(ZeroDivisionError, match="a fault of ours"):
        run("fail", "--how", "fault")


@pytest.mark.parametrize("argv", [["walk"], ["fail", "--fast"], [], ["show", "--policy", "other"]])
def test_wrong_usage_is_status_2(capsys, argv):
    with pytest.raises(SystemExit) as caught:
        run(*argv)
    assert caught.value.code == 2
    assert capsys.readouterr().out == ""


def test_help_begins_with_what_the_program_does(capsys):
    with pytest.raises(SystemExit) as caught:
        run("--help")
    assert caught.value.code == 0
    told = capsys.readouterr().out
    assert "usage: yard" in told
    assert "Does things." in told
    assert "Ends as it is told to." in told


def test_a_subcommands_help_has_all_of_its_text_and_examples(capsys):
    with pytest.raises(SystemExit):
        run("fail", "--help")
    told = capsys.readouterr().out
    assert "In a way that has a second paragraph, whose lines are joined.\n" in told
    assert "Examples:\n    yard fail --how data\n    yard fail\n" in told
    with pytest.raises(SystemExit):
        run("--help")
    told = capsys.readouterr().out
    assert "second paragraph" not in told
    assert "Does things.\n\nExamples:\n  yard fail --how data\n\n" in told
    assert read_examples(Fail) == ["yard fail --how data", "yard fail"]
    assert read_examples(Show) == []


@pytest.mark.parametrize("argv", [["-v", "log"], ["log", "--verbose"]])
def test_log_lines_are_printed_if_asked_for_and_only_then(capsys, argv):
    line = f"{__name__.partition('.')[0]}.deep: chosen\nshared.kernels: cpu\n"
    assert run(*argv) == 0
    assert capsys.readouterr() == ("shown\n", line)
    assert run("log") == 0
    assert capsys.readouterr() == ("shown\n", "")


@pytest.mark.parametrize("argv", [["-q", "log"], ["log", "--quiet"]])
def test_progress_is_hidden_if_asked_for(capsys, argv):
    assert run(*argv) == 0
    assert capsys.readouterr() == ("hidden\n", "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Compile:
    """Compiles kernels for some seconds, as a package's first run does."""

    seconds: float
    """How long."""

    def execute(self) -> None:
        after = jit.compile_s() + self.seconds
        jit.compile_s = lambda: after


def test_seconds_of_compiling_are_told_apart_from_work(capsys, monkeypatch):
    monkeypatch.setattr(jit, "compile_s", lambda: 5.0)
    assert run("compile", "--seconds", "12") == 0
    told = "yard: 12.0 s went into compiling kernels, which later runs load\n"
    assert capsys.readouterr() == ("", told)
    for argv in (("--seconds", "0.9"), ("--seconds", "12", "-q")):
        assert run("compile", *argv) == 0
        assert capsys.readouterr() == ("", "")


def run_a_demo(out, *, is_full):
    sys.stdout.write("skipped: a part that needs root\n")
    claim = Claim(
        name="rate", unit="rows/s", ours=30.0, baseline=10.0, baseline_name="one by one",
        higher_is_better=True, correct=not is_full,
    )  # fmt: skip
    return finish(out, "yard", [claim], {})


@dataclass(frozen=True, slots=True, kw_only=True)
class ShowDemo(DemoOptions):
    """Runs a demo."""

    def execute(self) -> int:
        return self.run_demo(run_a_demo)


@pytest.mark.parametrize(("argv", "status"), [([], 0), (["--full"], 1)])
def test_a_demos_status_says_whether_it_is_correct(capsys, tmp_path, argv, status):
    assert run("demo", "--out", str(tmp_path), *argv) == status
    told = capsys.readouterr()
    assert told.out == "skipped: a part that needs root\n"
    assert told.err.startswith("yard: rate: 30 rows/s against 10 (one by one), 3.00x")
    assert run("demo", "--out", str(tmp_path), "--json", *argv) == status
    told = capsys.readouterr()
    (claim,) = json.loads(told.out)["claims"]
    assert (claim["name"], claim["ratio"], claim["correct"]) == ("rate", 3.0, not status)
    assert "skipped: a part that needs root\n" in told.err


@pytest.mark.parametrize("place", ["afile", "afile/in"])
@pytest.mark.parametrize("json", [[], ["--json"]])
def test_a_demo_is_not_written_over_a_file(capsys, tmp_path, place, json):
    (tmp_path / "afile").write_text("mine")
    assert run("demo", "--out", str(tmp_path / place), *json) == 1
    told = f"yard: {tmp_path}/{place}: expected a folder, got a file; name another\n"
    assert capsys.readouterr() == ("", told)
    assert (tmp_path / "afile").read_text() == "mine"


def test_versions_stand_before_everything_but_a_scripts_own_words(capsys):
    assert run("fail", "--how", "fault", "--version") == 0
    told = capsys.readouterr().out.splitlines()
    # The package of these commands is shared itself.
    assert [line.split()[0] for line in told] == ["shared", "torch", "python"]
    with pytest.raises(SystemExit):
        run("fail", "--", "--version")


def test_results_are_text_or_one_json_object(capsys):
    assert run("show", "--widths", "4", "2") == 0
    assert capsys.readouterr().out == "exact (4, 2)\n"
    assert run("show", "--json") == 0
    told = capsys.readouterr().out
    assert json.loads(told) == {
        "policy": "exact", "widths": [2], "curve": [0.5, None, [None]], "loss": None,
    }  # fmt: skip
    assert told.count("\n") == 1


def test_a_name_from_outside_is_in_the_help_and_taken(capsys):
    def told_by_help():
        with pytest.raises(SystemExit):
            run("show", "--help")
        return capsys.readouterr().out

    assert "--policy {exact}" in told_by_help()
    POLICIES.add("coarse", "nowhere:Coarse", "much error")
    WIDTHS.add(8, object(), "a byte")
    try:
        assert "--policy {exact,coarse}" in told_by_help()
        assert "{2,4,8}" in told_by_help()
        assert run("show", "--policy", "coarse", "--widths", "8") == 0
        assert capsys.readouterr().out == "coarse (8,)\n"
        with pytest.raises(SystemExit) as caught:
            run("show", "--policy", "corse")
        assert caught.value.code == 2
        refused = capsys.readouterr().err
        assert "exact" in refused
        assert "coarse" in refused
    finally:
        POLICIES.remove("coarse")
        WIDTHS.remove(8)
    with pytest.raises(SystemExit) as caught:
        run("show", "--policy", "coarse")
    assert caught.value.code == 2


PRINTER = """
import sys
from contextlib import suppress
from dataclasses import dataclass
from shared.cli import run_command

@dataclass(frozen=True)
class Show:
    "Prints lines."
    lines: int = 1
    def execute(self):
        for line in range(self.lines):
            print(line)

if __name__ == "__main__":
    assert "torch" not in sys.modules
    sys.exit(run_command({"show": Show, "other": Show}, prog="yard", about="Prints."))
"""


@pytest.mark.parametrize("lines", [1, 100_000])
def test_a_reader_who_leaves_is_no_error(tmp_path, lines):
    (tmp_path / "yard.py").write_text(PRINTER)
    read, write = os.pipe()
    os.close(read)
    # Lines wait in a buffer, as they do for users, and the last ones meet the pipe at the end.
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    done = subprocess.run(
        [sys.executable, tmp_path / "yard.py", "show", "--lines", str(lines)],
        env=buffered,
        stdout=write,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (141, "")


def test_a_table_is_not_wrapped_in_a_pipe():
    table = Table("name", "text", box=None)
    table.add_row("long", "word " * 60)
    lines = draw_table(table).splitlines()
    assert len(lines) == 2
    assert lines[1].count("word") == 60
