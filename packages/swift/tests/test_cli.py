"""Commands: what they print, what they fail with, and that help is fast."""

import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time

import pytest

from shared.process_mark import make_marked_folder
from swift.cli import main
from swift.membership import client

SCRIPT = """
import sys
import torch
import swift
run = swift.join()
model = torch.nn.Linear(2, 2)
dp = swift.DataParallel(model, swift.undoable(torch.optim.SGD(model.parameters(), 0.1)), run)
def step(i):
    dp.backward(dp(torch.ones(1, 2)).sum())
run.loop(step, dp, until=2)
sys.stdout.write(f"rank {run.rank} {sys.argv[1:]}{chr(10)}")
"""


def test_a_scripts_own_options_reach_it(driver, tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    options = ("--batch", "64", "--report", "its-own")
    printed = driver.run(tmp_path, "-n", 2, "--spares", 0, "train.py", *options)
    assert sorted(printed.splitlines()) == [f"rank {rank} {list(options)}" for rank in range(2)]


def stepping(line, until=2):
    """The script with a line at the beginning of each step."""
    found = SCRIPT.replace("def step(i):", f"def step(i):\n    {line}")
    return found.replace("until=2", f"until={until}")


OVERFLOWS = """
import torch
import swift
from swift.injection import Fault, arm
arm([Fault(rank=1, recovery=0, step=0, point="start", bucket=1, after_s=0.3)])
run = swift.join()
model = torch.nn.ParameterList([torch.full((2,), 1e38) for _ in range(2)])
opt = swift.undoable(torch.optim.SGD(model.parameters(), 1.0), mode="arith")
dp = swift.DataParallel(model, opt, run, bucket_mb=1e-6)
run.loop(lambda i: dp.backward(sum((one * -3e38).sum() for one in model)), dp, until=2)
"""
MISTAKES = {
    "overflows where a step is undone": (
        OVERFLOWS,
        [
            "train.py, line 10: expected a checkpoint to go back to, got none: no rank has survived",
            "rank 0 counts as lost, as it could not undo: expected finite values after undoing in 'arith'",
        ],
    ),
    "raises at step 3": (
        stepping("assert i < 3, f'bad batch {i}'", until=9),
        ["AssertionError: bad batch 3", "rank . ended with status 1 before all steps were done"],
    ),
    "multiplies shapes that do not fit": (
        stepping("torch.ones(2, 3) @ torch.ones(2, 3)"),
        ["train.py\", line 9", "RuntimeError: mat1 and mat2 shapes cannot be multiplied"],
    ),
    "exits with words, a spare first": (
        "import os, time\ntime.sleep(0.5 if 'RANK' in os.environ else 0)\nraise SystemExit('no data in /none')",
        ["no data in /none"],
    ),
    "never joins": ("import torch", ["came to an end without run.loop.* with the run of swift.join"]),
    "never loops": ("import swift\nswift.join()", ["came to an end without run.loop"]),
    "reads without joining": (
        "import swift\nswift.StepData([1, 2], 2)[0]", ["expected swift.join.. before the first batch"],
    ),
    "reads more than there is": (
        "import swift\nrun = swift.join()\nswift.StepData([1, 2], 4)",
        ["train.py, line 3: global_batch: expected at most the dataset's 2 samples, got 4"],
    ),
    "diverges": (
        SCRIPT.replace(".sum())", ".sum())\n    return torch.tensor(float('nan')) if i else 1.0"),
        ["train.py, line ..: step 1: expected a finite loss, got nan; lower the learning rate, "],
    ),
    "leaves a parameter without its step": (
        stepping("return"), ["train.py, line ..: step 0: expected one update, got"],
    ),
}  # fmt: skip


LONG_S = 40
LIKE_OTHERS = {
    "multiplies shapes that do not fit", "never loops", "leaves a parameter without its step",
}  # fmt: skip


@pytest.mark.parametrize(
    "mistake",
    [pytest.param(m, marks=[pytest.mark.slow] if m in LIKE_OTHERS else []) for m in MISTAKES],
)
def test_a_scripts_mistake_is_said_once_for_all_ranks(driver, tmp_path, mistake):
    text, expected = MISTAKES[mistake]
    (tmp_path / "train.py").write_text(text)
    start_s = time.monotonic()
    options = ("-n", 2, "--spares", 1, "--heartbeat", LONG_S)
    printed = driver.run(tmp_path, *options, "train.py", status=1)
    assert time.monotonic() - start_s < LONG_S  # nobody waited for a rank to be found lost
    for sentence in expected:
        assert len(re.findall(sentence, printed)) == 1, printed
    assert printed.count("Traceback") <= 1
    assert "a spare of host" not in printed  # it ended for the ranks' reason
    assert not re.search("runpy|worker.py", printed)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["-n", "0"], "-n: expected at least one rank on this host, got 0; give"),
        (["--node-rank", "1"], "--node-rank: expected 0 to 0 for --nnodes 1, got 1; give"),
        (["--node-rank", "-1"], "--node-rank: expected 0 to 0 for --nnodes 1, got -1; give"),
        (["--nnodes", "0"], "--nnodes: expected at least one host, got 0; give"),
    ],
)
def test_ranks_that_cannot_be_are_wrong_usage(capsys, words, expected):
    expect_wrong_usage(["run", *words, "none.py"], expected, capsys)


def expect_wrong_usage(words, expected, capsys):
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("meshyard-swift: ")
    assert expected in line


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["run", "none.py"], "script: expected a Python file, got none.py"),
        (["run", "--spares", "-1", __file__], "expected --spares of 0 or more"),
        (["run", "--heartbeat", "nan", __file__], "got 1 and nan; leave them out"),
        (["run", "--heartbeat", "inf", __file__], "got 1 and inf; leave them out"),
        (["run", "--timeout", "nan", __file__], "expected a --timeout above 0 s"),
        (["run", "--wait", "-1", __file__], "a --wait of at least 0 s"),
        (["run", "--min-ranks", "2", __file__], "--min-ranks: expected 1 to the 1 ranks, got 2"),
        (["run", "--master-port", "99999", __file__], "--master-port: expected 0 to 65535"),
        (["run", "--picture", "x.png", __file__], "--picture x.png: expected a file .svg"),
        (["status", "--at", "nowhere"], "expected an address host:port, got 'nowhere'"),
        (["inject", "kill", "-1"], "expected a rank of 0 or more"),
        (["inject", "cut", "1", "--seconds", "nan"], "--seconds above 0, got 1 and nan"),
        (["plan-logs", "none.json", "--budget", "much"], "expected a size such as"),
        (["plan-logs", "none.json", "--budget", "1GB", "--interval", "0"], "--interval: expected"),
        (["simulate", "--steps", "0"], "expected num_steps and step_s above 0"),
        (["simulate", "--checkpoint", "nan"], "checkpoint_s of at least 0"),
        (["simulate", "--mtbf", "nan"], "--mtbf above 0"),
    ],
)
def test_what_cannot_be_is_wrong_usage(capsys, words, expected):
    expect_wrong_usage(words, expected, capsys)


def test_mistakes_are_said_before_torch_is_imported(tmp_path):
    code = (
        "import sys\nfrom swift.cli import main\n"
        "for words in (['run', 'none.py'], ['verify-log', 'none'], ['status']):\n"
        "    try:\n        main(words)\n    except SystemExit:\n        pass\n"
        "print('torch' in sys.modules)"
    )
    told = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert told.stdout == "False\n"
    assert len(told.stderr.splitlines()) == 3


def test_a_run_that_is_starting_is_waited_for_and_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(client, "START_S", 0.2)
    monkeypatch.setattr(client, "WAIT_S", 0.1)
    folder = make_marked_folder(tmp_path, client.RUN_PREFIX)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        (folder / "address").write_text(address)
        assert main(["status"]) == 1
        told = capsys.readouterr().err
        assert f"the run at {address} lives, but has not answered in 0.2 s; it is starting" in told
        assert main(["status", "--at", address]) == 1
        assert "or it is a run that is starting: then ask again" in capsys.readouterr().err


DIES_AS_A_SPARE = """
import time
if run.rank is None:
    raise SystemExit("no spare here")
"""


def test_a_spare_that_ends_is_told_at_once(driver, tmp_path):
    asks = "__import__('swift.cli').cli.main(['status'])"
    script = stepping(f"time.sleep(0.05) if i < 20 else {asks}", until=21).replace(
        "run = swift.join()", "run = swift.join()" + DIES_AS_A_SPARE
    )
    (tmp_path / "train.py").write_text(script)
    printed = driver.run(tmp_path, "-n", 1, "--spares", 1, "train.py")
    line = (
        "meshyard-swift: a spare of host 0 ended with status 1; no spare is left to take a lost "
        "rank's place\n"
    )
    assert printed.count(line) == 1, printed
    assert printed.count("no spare here") == 1
    assert "spare    host 0, ended with status 1\nno spare is left\n" in printed


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            ["--nnodes", "2", "--node-rank", "1", "--master-port", "1", "--wait", "0", "train.py"],
            "expected the first supervisor at 127.0.0.1:1 within 0 s",
        ),
        (["--master-port", "{port}", "train.py"], "expected a free port {port} on 127.0.0.1"),
        (["--report", "train.py/r.json", "train.py"], "--report train.py/r.json: expected a file that can"),
    ],
)  # fmt: skip
def test_wrong_values_are_refused_before_anything_starts(
    tmp_path, monkeypatch, capsys, words, expected
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert main(["run", *(word.format(port=port) for word in words)]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert re.match(f"meshyard-swift: .*{expected.format(port=port)}", line)


UNREACHED = """
from datetime import timedelta
from swift.injection import Fault, arm
from swift.training import runtime
arm([Fault(rank=1, recovery=0, step=1, point="forward")])
meet = runtime.join_world
def meet_elsewhere(rank, size, store, *, timeout, epoch, **more):
    if epoch:
        store, timeout = ("127.0.0.1", 1), timedelta(seconds=0.5)
    return meet(rank, size, store, timeout=timeout, epoch=epoch, **more)
runtime.join_world = meet_elsewhere
"""


@pytest.mark.slow
def test_a_store_that_is_not_reached_while_its_supervisor_lives_is_named(driver, tmp_path):
    (tmp_path / "train.py").write_text(UNREACHED + SCRIPT)
    options = ("-n", 2, "--spares", 1, "--heartbeat", 1)
    printed = driver.run(tmp_path, *options, "train.py", status=1)
    assert (
        len(re.findall("the store in which ranks meet at 127.0.0.1:1 within 0.5 s, got", printed))
        == 1
    )
    assert printed.count("Traceback") == 0


@pytest.mark.slow
def test_a_script_that_is_killed_whenever_it_starts_is_given_up(driver, tmp_path):
    (tmp_path / "train.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n")
    printed = driver.run(tmp_path, "-n", 1, "--spares", 0, "train.py", status=1)
    again = "meshyard-swift: rank 0 was killed by signal 11 (SIGSEGV) before the first step; it is started again\n"
    end = "meshyard-swift: ranks were lost 6 times before the first step; find out what kills them"
    assert printed.startswith(again * 5 + end)


def test_without_a_run_status_says_so(capsys):
    assert main(["status", "--at", "127.0.0.1:1"]) == 1
    assert capsys.readouterr().err.startswith("meshyard-swift: ")


@pytest.mark.parametrize(
    ("num", "told"), [(0, "no rank was lost"), (1, "1 recovery"), (2, "2 recoveries")]
)
def test_status_counts_recoveries(monkeypatch, capsys, num, told):
    """Not epochs: a wait for a spare has one of its own."""
    found = {"epoch": 2 * num, "num_recoveries": num, "processes": [], "failures": []}
    monkeypatch.setattr(client, "ask", lambda address, request: found)
    assert main(["status"]) == 0
    assert capsys.readouterr().out == f"{told}\n"


def test_status_names_lost_spares(monkeypatch, capsys):
    processes: list[dict] = [{"rank": 0, "host": 0, "step": 3, "is_ready": True}]
    spares = [{"host": 0, "how": "ended with status 1"}]
    found = {"num_recoveries": 0, "failures": [], "lost_spares": spares, "processes": processes}
    monkeypatch.setattr(client, "ask", lambda address, request: found)
    assert main(["status"]) == 0
    assert capsys.readouterr().out.splitlines()[1:] == [
        "rank 0   host 0, step 3",
        "spare    host 0, ended with status 1",
        "no spare is left",
    ]
    processes.append({"rank": None, "host": 0, "step": 0, "is_ready": True})
    assert main(["status"]) == 0
    assert capsys.readouterr().out.splitlines()[2:] == [
        "spare    host 0, step 0",
        "spare    host 0, ended with status 1",
    ]


@pytest.mark.parametrize(
    ("is_run", "sent", "told"),
    [
        (False, b"HTTP/1.1 400 Bad Request\r\n\r\n", "b'HTTP/1.1 400 Bad Request"),
        (False, b"", "no answer in 0.2 s"),
        # A first supervisor may be silent for long: it starts its processes.
        pytest.param(
            True,
            b"HTTP/1.1 400 Bad Request\r\n\r\n",
            "b'HTTP/1.1 400 Bad Request",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_something_else_that_listens_is_told_within_seconds(
    tmp_path, monkeypatch, capfd, sent, told, is_run
):
    monkeypatch.setattr(client, "WAIT_S", 0.2)
    (tmp_path / "train.py").write_text("import swift")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        held = []

        def answer():
            held.append(listener.accept()[0])
            held[0].sendall(sent)

        thread = threading.Thread(target=answer)
        thread.start()
        argv = ["status", "--at", f"127.0.0.1:{port}"]
        if is_run:
            argv = ["run", "--nnodes", "2", "--node-rank", "1", "--master-port", str(port)]
            argv += ["--spares", "0", str(tmp_path / "train.py")]
        assert main(argv) == 1
        thread.join()
        held[0].close()
    text = capfd.readouterr().err
    start = f"meshyard-swift: 127.0.0.1:{port}: expected a run's first supervisor, something else "
    assert text.startswith(f"{start}listens there and gave {told}")
    assert text.endswith("; give the address of `meshyard-swift run`\n")
    assert text.count("\n") == 1


@pytest.mark.parametrize("argv", [["demo", "--fast"], ["inject", "burn", "1"], ["run", "-n", "x"]])
def test_wrong_usage_is_status_2(argv):
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert caught.value.code == 2


def test_simulated_failures_are_printed_as_json(capsys):
    assert main(["simulate", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)


def test_help_imports_nothing_heavy():
    code = (
        "import sys, contextlib\nfrom swift.cli import main\n"
        "with contextlib.suppress(SystemExit): main(['--help'])\n"
        "heavy = {'torch', 'numpy', 'transformers', 'matplotlib'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for command in ("run", "status", "inject", "plan-logs", "verify-log", "simulate", "demo"):
        assert command in done.stdout
