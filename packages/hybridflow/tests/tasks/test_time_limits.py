"""Time limits: they hold whatever the code of a call does with signals, timers and clocks."""

import time

import pytest

from hybridflow.tasks.rewards import reward
from hybridflow.tasks.time_limits import time_limit

from .test_containment import CHARS, roll_of, scores_of


@pytest.mark.parametrize(
    "code",
    [
        "import signal; signal.signal(signal.SIGALRM, lambda *_: None); signal.alarm(9)",
        "import signal; signal.setitimer(signal.ITIMER_REAL, 0)",
        "",
    ],
    ids=["own alarm", "no alarm", "plain"],
)
@pytest.mark.parametrize("swallows", [False, True])
def test_a_time_limit_holds_whatever_alarm_code_sets(code, swallows):
    wait = "import time; time.sleep(5)"
    if swallows:
        wait = f"for _ in range(3):\n    try: {wait}\n    except BaseException: pass"
    start = time.monotonic()
    assert scores_of("pass", f"{code}\n{wait}", "pass", time_limit_s=0.2) == [1, 0, 1]
    assert time.monotonic() - start < 3


@pytest.mark.parametrize(
    "prevention",
    [
        "signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())",
        "signal.signal(signal.SIGRTMAX, signal.SIG_IGN)",
    ],
)
def test_a_call_that_cannot_be_interrupted_is_late_at_its_end(prevention):
    code = f"import signal, time; {prevention}; time.sleep(0.2)"
    wait = "import time; time.sleep(5)"
    start = time.monotonic()
    assert scores_of(code, wait, "pass", time_limit_s=0.1) == [0, 0, 1]
    assert time.monotonic() - start < 3


def test_the_watchdog_outlives_code_that_replaces_its_functions():
    code = "import signal, time; time.monotonic = signal.pthread_kill = None; time.sleep(5)"
    start = time.monotonic()
    assert scores_of(code, code, "pass", time_limit_s=0.1) == [0, 0, 1]
    assert time.monotonic() - start < 3


def test_an_alarm_of_codes_own_rings_within_a_time_limit():
    code = """
import signal, time
def late(*_): raise TimeoutError
before = signal.signal(signal.SIGALRM, late)
signal.setitimer(signal.ITIMER_REAL, 0.05)
try: time.sleep(5)
except TimeoutError: pass
finally: signal.signal(signal.SIGALRM, before)
"""
    assert scores_of(code, time_limit_s=2) == [1]


def test_limits_may_nest():
    def inner(sample, text):
        with time_limit(0.05):
            time.sleep(5)
        return 1.0

    def outer(sample, text):
        scored = reward(on_error="zero")(inner)(roll_of("pass"), CHARS)
        time.sleep(5 * sample["waits"])
        return float(scored["scores"]) + 1

    roll = roll_of("pass", "pass")
    roll["waits"] = [0, 1]
    start = time.monotonic()
    assert reward(on_error="zero", time_limit_s=0.5)(outer)(roll, CHARS)["scores"].tolist() == [
        1,
        0,
    ]
    assert time.monotonic() - start < 4
