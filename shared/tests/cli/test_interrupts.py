import os
import signal
import sys
import time

import pytest

from shared.cli.interrupts import Interrupts

SWALLOWS = """
import os, signal
try:
    os.kill(os.getpid(), signal.SIGINT)
    for _ in range(100_000):
        pass
except BaseException:
    pass
is_whole = True
"""


@pytest.fixture(autouse=True)
def default_handler():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_an_import_that_swallows_an_interrupt_is_ended_and_then_interrupted(tmp_path, monkeypatch):
    (tmp_path / "swallows_interrupts.py").write_text(SWALLOWS)
    monkeypatch.syspath_prepend(tmp_path)

    def work():
        __import__("swallows_interrupts")
        time.sleep(10.0)  # comes to no end

    with pytest.raises(KeyboardInterrupt), Interrupts() as interrupts:
        work()
    assert interrupts.have_come
    assert sys.modules.pop("swallows_interrupts").is_whole
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_outside_an_import_an_interrupt_is_raised_where_it_comes():
    done = []

    def work():
        os.kill(os.getpid(), signal.SIGINT)
        done.append("work")

    with pytest.raises(KeyboardInterrupt), Interrupts() as interrupts:
        work()
    assert interrupts.have_come
    assert done == []


def test_what_trains_while_it_is_imported_is_interrupted_after_a_while(tmp_path, monkeypatch):
    (tmp_path / "trains_for_ever.py").write_text(
        "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(60.0)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    begun = time.monotonic()
    with pytest.raises(KeyboardInterrupt), Interrupts(import_limit_s=0.2):
        __import__("trains_for_ever")
    assert time.monotonic() - begun < 30.0


IGNORES = SWALLOWS + "before = signal.signal(signal.SIGINT, signal.SIG_IGN)\n"


def test_a_block_that_ignores_interrupts_behind_an_import_only_delays_it(tmp_path, monkeypatch):
    (tmp_path / "ignores_interrupts.py").write_text(IGNORES)
    monkeypatch.syspath_prepend(tmp_path)
    done = []

    def work():
        before = __import__("ignores_interrupts").before
        time.sleep(0.2)
        done.append("what may not be interrupted")
        signal.signal(signal.SIGINT, before)
        time.sleep(10.0)
        done.append("work")

    with pytest.raises(KeyboardInterrupt), Interrupts():
        work()
    assert done == ["what may not be interrupted"]
