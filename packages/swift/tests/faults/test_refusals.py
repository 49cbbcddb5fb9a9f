"""What is refused before anything is started, with its text."""

import re
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import swift
from shared.errors import ConfigError
from swift.membership.first_host import listen
from swift.membership.settings import Launch


def launch(**changes):
    given = {
        "script": (__file__,),
        "host": 0,
        "ranks": (0,),
        "num_spares": 0,
        "world_size": 1,
        "heartbeat_s": 1.0,
    }
    return Launch(**{**given, **changes})


def test_a_port_that_is_taken():
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=f"expected a free port {port} .*--master-port"):
            listen("127.0.0.1", port)


def test_a_script_that_is_not_there():
    with pytest.raises(ConfigError, match=r"expected a Python file, got nowhere\.py"):
        launch(script=("nowhere.py",))


def test_numbers_out_of_range():
    with pytest.raises(ConfigError, match="spares of 0 or more"):
        launch(num_spares=-1)
    for heartbeat_s in (0.0, float("nan"), float("inf")):
        with pytest.raises(ConfigError, match="--heartbeat above 0 s and of at most"):
            launch(heartbeat_s=heartbeat_s)


def test_a_script_that_python_cannot_read_is_named_with_its_line(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("import torch\ndef step(:\n")
    with pytest.raises(ConfigError, match=r"expected a Python file, got .*line 2\) in .*train\.py"):
        launch(script=(str(script),))


def test_joining_without_a_supervisor():
    with pytest.raises(ConfigError, match="expected a process of `meshyard-swift run"):
        swift.join()


def test_a_parameter_that_the_optimizer_does_not_have():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    opt = swift.undoable(torch.optim.SGD(model[0].parameters(), 0.1))
    with pytest.raises(ConfigError, match=r"got none of 1\.weight, 1\.bias"):
        swift.DataParallel(
            model, opt, SimpleNamespace(rank=0, world_size=1, reads_whole_batches=False)
        )


def test_sizes_out_of_range():
    model = torch.nn.Linear(2, 2)
    opt = swift.undoable(torch.optim.SGD(model.parameters(), 0.1))
    with pytest.raises(ConfigError, match="positive bucket_mb and clip_norm, got 0"):
        swift.DataParallel(
            model,
            opt,
            SimpleNamespace(rank=0, world_size=1, reads_whole_batches=False),
            bucket_mb=0,
        )


def test_help_is_fast_for_want_of_torch():
    code = (
        "import sys\nfrom swift.cli import main\n"
        "try:\n    main(['run', '--help'])\nexcept SystemExit:\n    pass\n"
        "print('torch' in sys.modules)"
    )
    command = [sys.executable, "-c", code]
    told = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    assert told.splitlines()[-1] == "False"
    assert "--spares" in told


def test_the_page_of_faults_names_tests_that_there_are():
    tests = Path(__file__).parents[1]
    page = (tests.parent / "docs" / "faults.md").read_text()
    there = set(
        re.findall(
            r"^def (test_\w+)",
            "\n".join(p.read_text() for p in tests.rglob("test_*.py")),
            re.MULTILINE,
        )
    )
    rows = [line for line in page.splitlines() if line.startswith("| ")][2:]
    named = [re.findall(r"`(test_\w+)`", row) for row in rows]
    assert all(named)
    assert {name for names in named for name in names} <= there
