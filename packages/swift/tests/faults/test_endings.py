"""What a run leaves behind when it is interrupted, or its supervisor killed: nothing."""

import json
import re
import signal
import socket
import tempfile

import launching
import pytest
from launching import STEPS

from swift.cli import main


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGINT,
        *(pytest.param(one, marks=pytest.mark.slow) for one in (signal.SIGTERM, signal.SIGHUP)),
    ],
)
def test_an_interrupted_run_leaves_nothing(driver, tmp_path, number):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    options = ("-n", "2", "--spares", "1", "--master-port", str(port))
    driver.begin(tmp_path, *launching.arguments(tmp_path, *options, steps=400, step_s=0.05))
    launching.wait_for_step(tmp_path, 3)
    driver.signal(number)
    assert driver.end(status=130) == (
        "meshyard-swift: interrupted; start again by the same command\n"
    )
    socket.create_server(("127.0.0.1", port)).close()


def test_a_run_tells_its_state_and_takes_faults(driver, tmp_path, monkeypatch, capsys, undisturbed):
    monkeypatch.setattr(tempfile, "tempdir", str(driver.temporary))
    options = ("-n", "3", "--spares", "2", "--heartbeat", "1")
    driver.begin(tmp_path, *launching.arguments(tmp_path, *options, steps=STEPS, step_s=0.1))
    launching.wait_for_step(tmp_path, 4)
    assert main(["status", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert sorted(one["rank"] for one in told["processes"] if one["rank"] is not None) == [0, 1, 2]
    assert main(["inject", "kill", "2"]) == 0
    assert "kill: rank 2" in capsys.readouterr().out
    for words, text in [(["cut", "0"], "rank 0 is on the first host"), (["kill", "7"], "got 7")]:
        assert main(["inject", *words]) == 1
        assert text in capsys.readouterr().err
    launching.wait_for_step(tmp_path, 9)
    assert main(["inject", "stop", "1"]) == 0
    assert "stop: rank 1" in capsys.readouterr().out
    driver.end()
    assert launching.states(tmp_path) == undisturbed()
    failures = launching.failures(tmp_path)
    assert [failure["lost"][0]["rank"] for failure in failures] == [2, 1]
    # A stopped rank is killed at the limit.
    for failure, least_s in zip(failures, (0, 1), strict=True):
        assert "SIGKILL" in failure["lost"][0]["how"]
        assert all(
            least_s <= rank["seconds"]["detect"] < least_s + 1 for rank in failure["ranks"].values()
        )


@pytest.mark.slow
def test_a_killed_supervisor_leaves_no_process_and_the_run_resumes(driver, tmp_path, undisturbed):
    options = ("-n", "3", "--spares", "1")
    given = {"steps": STEPS, "checkpoint": 4, "step_s": 0.2}
    process = launching.launch(tmp_path, *options, temporary=driver.temporary, **given)
    launching.wait_for_step(tmp_path, 9)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert launching.wait_until_gone(process.pid) == []
    before = launching.states(tmp_path)
    # What it left in the folder for temporary files is removed by the next run.
    printed = driver.train(tmp_path, "-n", "3", "--spares", "0", steps=STEPS, checkpoint=4)
    assert re.search("resumed from step (8|12) of", printed), printed
    assert launching.states(tmp_path) == undisturbed()
    assert max(before) < STEPS
