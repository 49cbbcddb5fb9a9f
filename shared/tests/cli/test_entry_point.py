"""Ctrl-C before a command has begun."""

import signal
import sys
import threading

import pytest

from shared.cli.entry_point import run_program


@pytest.fixture
def plant(tmp_path, monkeypatch):
    """Makes a package of the given command line, and returns its name."""

    def write(cli):
        home = tmp_path / "planted"
        home.mkdir()
        (home / "__init__.py").touch()
        (home / "cli.py").write_text(cli)
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.setattr(sys, "argv", ["/somewhere/meshyard-planted"])
        return "planted"

    yield write
    for name in ("planted", "planted.cli"):
        sys.modules.pop(name, None)


def test_the_status_is_that_of_main_and_interrupts_are_its_own(plant):
    package = plant(
        "import signal\n"
        "def main(): return 7 * (signal.getsignal(signal.SIGINT) is signal.default_int_handler)"
    )
    assert run_program(package) == 7


def test_an_interrupt_while_arguments_are_parsed_ends_in_one_line(plant, capfd):
    package = plant("def main(): raise KeyboardInterrupt")
    assert run_program(package) == 130
    told = "meshyard-planted: interrupted; start again by the same command\n"
    assert capfd.readouterr() == ("", told)


def test_an_import_that_fails_leaves_interrupts_as_they_were(plant):
    package = plant("raise ImportError('no')")
    with pytest.raises(ImportError, match="no"):
        run_program(package)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ignored_interrupts_stay_ignored(plant, monkeypatch):
    package = plant(
        "import signal\nHANDLER = signal.getsignal(signal.SIGINT)\ndef main(): return HANDLER"
    )
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        assert run_program(package) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_thread_can_run_a_program(plant):
    package, found = plant("def main(): return 3"), []
    thread = threading.Thread(target=lambda: found.append(run_program(package)))
    thread.start()
    thread.join()
    assert found == [3]
