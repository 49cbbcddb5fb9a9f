"""Rewards that run responses as code: what the code does neither ends nor changes the run."""

import builtins
import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import torch

from hybridflow.algorithms.dataflow import score_batch
from hybridflow.tasks.containment import Containment
from hybridflow.tasks.rewards import Reward, RewardOptions, reward
from hybridflow.tasks.tokenizers import CharTokenizer
from hybridflow.training.sources import find_reward
from hybridflow.workers.batch.batch import Batch
from shared.errors import ConfigError, DataError

CHARS = CharTokenizer("01")
OPTIONS = {
    "zero": RewardOptions(on_error="zero"),
    "fail": RewardOptions(on_error="fail"),
    "drop": RewardOptions(on_error="drop"),
}


def run_code(sample, text):
    """1 if the sample's code runs, like the code of a response."""
    exec(sample["code"], {"sample": sample})  # noqa: S102
    return 1.0


def roll_of(*codes):
    tokens = torch.full((len(codes), 2), 2)
    return Batch(
        tokens=tokens, mask=tokens == 2, sample_ids=torch.arange(len(codes)) + 7, code=list(codes)
    )


def scores_of(*codes, **options):
    scored = reward(on_error="zero", **options)(run_code)(roll_of(*codes), CHARS)
    return scored["scores"].tolist()


# None with status 0: a test run that they end must not pass.
ENDING = {
    "exit": "import sys; sys.exit(0)",
    "quit": "raise SystemExit",
    "interrupt": "raise KeyboardInterrupt",
    "generator exit": "raise GeneratorExit",
    "own base": "raise type('Mine', (BaseException,), {})('x')",
    "_exit": "import os; os._exit(3)",
    "_exit by name": "from os import _exit; _exit(3)",
    "_exit in a thread": "import os, threading\n"
    "t = threading.Thread(target=lambda: os._exit(3)); t.start(); t.join(); raise ValueError",
    "abort": "import os; os.abort()",
    "execv": "import os; os.execv('/bin/false', ['false'])",
    "execvp": "import os; os.execvp('false', ['false'])",
    "unprintable": "class Mine(ValueError):\n    def __str__(self): raise SystemExit\nraise Mine",
    "recursion": "f = lambda: f()\nf()",
    "memory": "bytearray(1 << 62)",
}


@pytest.mark.parametrize("code", ENDING.values(), ids=ENDING)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_code_that_ends_the_process_is_an_error_of_its_row(code):
    assert scores_of("pass", code, "pass") == [1, 0, 1]
    scored = Reward(run_code, OPTIONS["drop"])(roll_of("pass", code), CHARS)
    assert scored["is_dropped"].tolist() == [False, True]
    assert scored.meta == {"reward_errors": 1}
    with pytest.raises(DataError, match=r"sample 8 \(row 1\): it raised \w+") as raised:
        Reward(run_code, OPTIONS["fail"])(roll_of("pass", code), CHARS)
    causes = []
    error = raised.value
    while error is not None:
        causes.append(error)
        error = error.__cause__
    assert not any(isinstance(cause, KeyboardInterrupt | SystemExit) for cause in causes)


CHANGING = {
    "directory": ("import os; os.chdir('/')", os.getcwd),
    "gone directory": (
        "import os, tempfile; d = tempfile.mkdtemp(); os.chdir(d); os.rmdir(d)", os.getcwd,
    ),
    "variable": ("import os; os.environ['HOME'] = '/x'", lambda: os.environ.get("HOME")),
    "new variable": ("import os; os.environ['NEW_ONE'] = '1'", lambda: os.environ.get("NEW_ONE")),
    "no variables": ("import os; os.environ.clear()", lambda: dict(os.environ)),
    "builtin": ("import builtins; builtins.len = lambda _: 3", lambda: builtins.len),
    "no builtin": ("import builtins; del builtins.sorted", lambda: builtins.sorted),
    "function of os": ("import os; os.getpid = None; os.remove = None", lambda: (os.getpid, os.remove)),
    "guards": (
        ("import shutil, signal, subprocess, time\n"
        "shutil.rmtree = subprocess.Popen = signal.setitimer = signal.signal = time.monotonic = None"),
        lambda: (shutil.rmtree, subprocess.Popen, signal.setitimer, signal.signal, time.monotonic),
    ),
    "sys.path": ("import sys; sys.path.insert(0, '/x')", lambda: list(sys.path)),
    "recursion limit": ("import sys; sys.setrecursionlimit(5000)", sys.getrecursionlimit),
    "trace": ("import sys; sys.settrace(lambda *_: None)", sys.gettrace),
    "profile": ("import sys; sys.setprofile(lambda *_: None)", sys.getprofile),
    "open files": (
        "import resource as r; r.setrlimit(r.RLIMIT_NOFILE, (64, r.getrlimit(r.RLIMIT_NOFILE)[1]))",
        lambda: __import__("resource").getrlimit(__import__("resource").RLIMIT_NOFILE),
    ),
    "blocked": (
        "import signal; signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])",
        lambda: signal.pthread_sigmask(signal.SIG_BLOCK, ()),
    ),
    "alarm": (
        "import signal; signal.signal(signal.SIGALRM, print); signal.alarm(60)",
        lambda: (signal.getsignal(signal.SIGALRM), signal.getitimer(signal.ITIMER_REAL)[0] < 60),
    ),
    "ignored interrupt": (
        "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)",
        lambda: signal.getsignal(signal.SIGINT),
    ),
    "own handler": (
        "import signal; signal.signal(signal.SIGTERM, print)",
        lambda: signal.getsignal(signal.SIGTERM),
    ),
    "gradients": ("import torch; torch.set_grad_enabled(False)", torch.is_grad_enabled),
    "dtype": ("import torch; torch.set_default_dtype(torch.float64)", torch.get_default_dtype),
    "deterministic": (
        "import torch; torch.set_deterministic_debug_mode(1)",
        torch.get_deterministic_debug_mode,
    ),
    "threads": ("import torch; torch.set_num_threads(3)", torch.get_num_threads),
    "stdout": ("import sys; sys.stdout.close()", lambda: (sys.stdout, sys.stdout.closed)),
    "detached": ("import sys; sys.stdout.detach()", lambda: (sys.stdout, sys.stdout.closed)),
    "no stderr": ("import sys; sys.stderr = None", lambda: sys.stderr),
    "buffer": ("import sys; sys.stdout.buffer.close()", lambda: (sys.stdout, sys.stdout.closed)),
    "other wrapper": (
        ("import gc, io, sys\n"
        "sys.stdout = io.TextIOWrapper(sys.stdout.buffer); sys.stdout = None; gc.collect()"),
        lambda: (sys.stdout, sys.stdout.closed),
    ),
    "entered": (
        "import sys\nwith sys.stdout as out: print(end='', file=out)",
        lambda: (sys.stdout, sys.stdout.closed),
    ),
    "first stdout": ("import sys; sys.__stdout__.close()", lambda: sys.__stdout__.closed),
    "stdin": ("import sys; sys.stdin.close()", lambda: (sys.stdin, sys.stdin.closed)),
    "files": (
        "import os; os.close(0); os.close(1); os.close(2)",
        lambda: [os.fstat(number).st_ino for number in range(3)],
    ),
    "other file": (
        "import os; os.dup2(os.open('/dev/null', os.O_WRONLY), 1)", lambda: os.fstat(1).st_ino,
    ),
}  # fmt: skip


@pytest.mark.parametrize(("code", "read"), CHANGING.values(), ids=CHANGING)
def test_what_code_changes_of_the_process_is_undone(code, read):
    before = read()
    assert scores_of(code, "pass") == [1, 1]
    assert read() == before
    assert scores_of(f"{code}\nraise ValueError", "pass") == [0, 1]
    assert read() == before


# Checks of signatures draw from Python's generator themselves.
@pytest.mark.unchecked
@pytest.mark.parametrize(
    "code",
    [
        "random.seed(0)", "numpy.random.seed(0)", "torch.manual_seed(0)",
        "random.random(), numpy.random.rand(), torch.rand(1), torch.rand(1)",
    ],
)  # fmt: skip
def test_generators_of_the_run_go_on_as_if_no_code_had_drawn(code):
    def read():
        return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()

    before = read()
    with Containment(3) as containment, containment.call():
        exec(f"import numpy, random, torch; {code}")  # noqa: S102
        assert read() != before
    assert read() == before


def test_the_next_row_starts_in_the_same_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cases").write_text("1")
    assert scores_of("import os; os.chdir('/')", "open('cases').close()") == [1, 1]


@pytest.mark.parametrize(
    ("code", "following"),
    [
        ("os.close(1)", "os.fstat(1)"),
        (
            "os.dup2(os.open('/dev/null', os.O_WRONLY), 2)",
            "assert sample['file'] == os.fstat(2).st_ino",
        ),
        ("signal.setitimer(signal.ITIMER_REAL, 0.02)", "time.sleep(0.1)"),
        # Long enough not to end the process before the call ends, whatever else takes its time.
        ("signal.setitimer(signal.ITIMER_PROF, 0.3)", "sum(range(60_000_000))"),
        ("builtins.len = None", "len('')"),
        ("os.getpid = None", "os.getpid()"),
    ],
)
def test_nothing_of_a_call_reaches_into_the_next_one(code, following):
    roll = roll_of(*(f"import builtins, os, signal, time; {line}" for line in (code, following)))
    roll["file"] = [os.fstat(2).st_ino] * 2
    assert reward(on_error="zero")(run_code)(roll, CHARS)["scores"][1] == 1


def test_changes_are_told_once(caplog):
    changing = reward(run_code)
    for _ in range(2):
        changing(roll_of("import os; os.chdir('/')", "import sys; sys.path.append('/x')"), CHARS)
    (told,) = [record.getMessage() for record in caplog.records if "undone" in record.getMessage()]
    assert "run_code" in told
    assert told.endswith("sys.path, working directory")
    caplog.clear()
    with contextlib.suppress(AttributeError):
        del builtins.added_name
    changing(roll_of("import builtins; builtins.added_name = 1"), CHARS)
    assert not caplog.records
    del builtins.added_name


def test_a_copy_of_the_process_does_not_go_on():
    code = """
import os
with open(sample["path"], "a") as file:
    pid = os.fork()
    print("copy" if pid == 0 else "original", file=file)
if pid:
    sample["status"].append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""
    read, write = os.pipe()
    try:
        roll = roll_of(code)
        roll["path"], roll["status"] = [f"/dev/fd/{write}"], [statuses := []]
        process = os.getpid()
        scored = reward(run_code)(roll, CHARS)
        if os.getpid() != process:
            os._exit(3)  # the copy has gone on, and the original sees it
        assert scored["scores"].tolist() == [1]
        assert statuses == [1]
        assert sorted(os.read(read, 100).split()) == [b"copy", b"original"]
    finally:
        os.close(read)
        os.close(write)


def test_exits_work_as_ever_outside_of_calls_and_in_children():
    assert scores_of("import subprocess; subprocess.run(['true'], check=True)") == [1]
    code = """
import os
pid = os.fork()
if not pid:
    os._exit(5)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 5
"""
    assert scores_of(code) == [1]
    pid = os.fork()
    if not pid:
        os._exit(6)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 6


def test_a_programs_own_timer_goes_on_ringing_while_calls_are_shorter():
    rings = []
    before = signal.signal(signal.SIGALRM, lambda *_: rings.append(1))
    signal.setitimer(signal.ITIMER_REAL, 0.02, 0.02)
    try:
        assert scores_of(*["import time; time.sleep(0.005)"] * 40) == [1] * 40
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert len(rings) > 3


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_of_a_call_may_have_the_number_of_one_that_has_ended():
    may_end, numbers = threading.Event(), []

    def leave():
        numbers.append(threading.get_ident())
        os._exit(3)

    outsider = threading.Thread(target=may_end.wait)
    outsider.start()
    ended = outsider.ident
    with Containment(3) as containment:
        may_end.set()
        outsider.join()
        with containment.call():
            for _ in range(100):
                thread = threading.Thread(target=leave)
                thread.start()
                thread.join()
    assert ended in numbers


def test_exits_are_errors_in_a_forked_program_too():
    assert scores_of("pass") == [1]
    pid = os.fork()
    if not pid:
        status = 1
        with contextlib.suppress(BaseException):
            status = int(scores_of("import os; os._exit(7)", "pass") != [0, 1])
        os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


@pytest.fixture
def own_interrupt():
    """Python's handler of Ctrl-C, which a shell's background jobs lack."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield signal.default_int_handler
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize(
    "swallows", ["", "try:\n", "import signal as s; s.signal(s.SIGTERM, s.SIG_IGN)\n"]
)
def test_a_users_interrupt_ends_the_run(swallows, own_interrupt):
    wait = "signal.raise_signal(signal.SIGINT)\n"
    code = f"import signal\n{swallows}"
    code += f" {wait}except BaseException: pass\n" if swallows == "try:\n" else wait
    with pytest.raises(KeyboardInterrupt):
        scores_of("pass", code, "pass")
    assert signal.getsignal(signal.SIGINT) is own_interrupt


def test_a_programs_own_exit_by_a_signal_is_not_the_rewards():
    def leave(*_):
        raise SystemExit(3)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        for score in (reward(on_error="zero")(run_code), run_all):
            with pytest.raises(SystemExit) as raised:
                score_batch(
                    roll_of("import signal; signal.raise_signal(signal.SIGTERM)"),
                    lambda roll, score=score: score(roll, CHARS),
                )
            assert raised.value.code == 3
        assert signal.getsignal(signal.SIGTERM) is leave
    finally:
        signal.signal(signal.SIGTERM, before)


def run_all(roll, _):
    for code in roll["code"]:
        exec(code)  # noqa: S102
    return Batch(scores=torch.ones(len(roll)))


def test_a_score_without_options_that_exits_is_refused():
    with pytest.raises(DataError, match=r"it called exit\(0\); mark the function"):
        score_batch(roll_of("raise SystemExit(0)"), lambda roll: run_all(roll, CHARS))


def test_random_numbers_of_a_reward_depend_on_its_responses_alone():
    drawn = []

    def draws(sample, text):
        drawn.append((random.random(), np.random.rand(), float(torch.rand(1))))
        return drawn[-1][0]

    for seed, count in ((0, 3), (1, 3)):
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        reward(draws)(roll_of(*["pass"] * count), CHARS)
    assert drawn[:3] == drawn[3:]
    assert len({numbers[0] for numbers in drawn}) == 3  # rows differ
    other = roll_of("pass")
    other["tokens"] += 1
    reward(draws)(other, CHARS)
    assert drawn[-1] != drawn[0]


@pytest.mark.unchecked
def test_threads_overlap_and_leave_all_as_it_was():
    before = (os.getcwd(), dict(os.environ), sys.stdout, random.getstate())
    meet = threading.Barrier(3)

    def score(k):
        with Containment(k) as containment:
            for _ in range(20):
                with contextlib.suppress(SystemExit), containment.call():
                    os.environ["K"] = str(k)
                    random.seed(k)
                    meet.wait(10)
                    os._exit(3)

    threads = [threading.Thread(target=score, args=(k,)) for k in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert (os.getcwd(), dict(os.environ), sys.stdout, random.getstate()) == before


def test_a_program_without_streams_scores(monkeypatch):
    for name in ("stdin", "stdout", "__stdout__"):
        monkeypatch.setattr(sys, name, None)
    assert scores_of("pass") == [1]
    assert sys.stdout is None


def test_a_file_of_rewards_that_exits_is_refused(tmp_path):
    path = tmp_path / "exits_at_once.py"
    path.write_text("import sys\nsys.exit(0)\n")
    with pytest.raises(ConfigError, match=r"it called exit\(0\) when it was imported"):
        find_reward(f"{path}:score", "reward")


SCRIPT = """
import sys
import hybridflow as hy
from hybridflow.tasks.prompts import Prompts
from hybridflow.tasks.tokenizers import ByteTokenizer

@hy.reward(on_error="zero", time_limit_s=2)
def runs(sample, text):
    exec(sample["code"])
    return 1.0

CODES = ["pass", "exit()", "import os; os._exit(0)", "import sys; sys.stdout.close()"]
CODES += ["import os; os.close(1)", "import os; os.fork()", "raise KeyboardInterrupt"]
prompts = Prompts(
    [{"prompt": "1", "code": code} for code in CODES], ByteTokenizer(), batch_size=len(CODES),
    seed=0, max_prompt_tokens=8,
)
with hy.Workers.inline() as workers:
    actor = hy.Actor(
        {**hy.PRESETS["tiny-llama"], "vocab_size": 272}, workers.pool(1), optimizer=hy.AdamW(lr=1e-3)
    )
    grpo = hy.algos.GRPO(
        actor=actor, score=lambda roll: runs(roll, ByteTokenizer()),
        sampling=hy.Sampling(max_new_tokens=2, num_samples=2),
    )
    for metrics in hy.loops.run(grpo, prompts.batch, steps=2):
        print("reward", metrics["reward"])
print("finished", file=sys.stdout)
"""


@pytest.mark.slow
def test_training_survives_its_rewards(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    ended = subprocess.run(
        [sys.executable, path], check=False, capture_output=True, text=True, timeout=100
    )
    assert ended.returncode == 0, ended.stderr
    lines = ended.stdout.splitlines()
    assert lines[-1] == "finished"
    assert [float(line.split()[1]) for line in lines[:-1]] == [pytest.approx(4 / 7)] * 2


def test_a_recipes_run_that_exits_fails(tmp_path, monkeypatch, capsys):
    from hybridflow.cli import main
    from hybridflow.training.runtime import Run

    def exits(*_):
        raise SystemExit(0)

    monkeypatch.setattr(Run, "steps", exits)
    assert main(["train", "grpo-sort", "--set", "steps=1"]) == 1
    assert "training ended before its last step" in capsys.readouterr().err
