"""A run of swift that writes its checkpoints through bytecheckpoint, is killed whole, and resumes from one."""

import json
import os
import subprocess
import sys

import pytest

TRAIN = """
import json, os, signal, sys
from functools import partial
from pathlib import Path
import torch
import swift
from bytecheckpoint import DCPReader, DCPWriter
from shared.kernels.digest import digest
from swift.injection import Fault, arm

folder, dies_at = Path(sys.argv[1]), int(sys.argv[2])
if dies_at > 0:  # what was written must be written again: it was not committed
    arm([Fault(rank=1, recovery=0, step=4, point="commit")])
run = swift.join()
torch.manual_seed(0)
model = torch.nn.Sequential(
    torch.nn.Linear(16, 32), torch.nn.Dropout(0.2), torch.nn.BatchNorm1d(32), torch.nn.Linear(32, 5)
)
optimizer = swift.undoable(torch.optim.AdamW(model.parameters(), 1e-2))
schedule = torch.optim.lr_scheduler.StepLR(optimizer.optimizer, 3, 0.5)
dp = swift.DataParallel(model, optimizer, run, stateful=[schedule])
samples = list(zip(torch.randn(64, 16), torch.randint(0, 5, (64,))))
data = swift.StepData(samples, global_batch=8, seed=1)
begun = []

def step(i):
    begun.append(i)
    if i == dies_at:
        os.kill(os.getpid(), signal.SIGKILL)
    x, y = data[i]
    dp.backward(torch.nn.functional.cross_entropy(dp(x), y))
    schedule.step()

every = swift.Every(4, folder / "checkpoints", writer=partial(DCPWriter, overwrite=True), reader=DCPReader)
run.loop(step, dp, until=10, checkpoint=every)
state = [one for entry in range(len(dp.versions())) for one in dp.state_of(entry).values()]
(folder / f"rank-{run.rank}").write_text(json.dumps([begun[0], digest(state)]))
"""


def train(folder, dies_at):
    folder.mkdir(exist_ok=True)
    (folder / "train.py").write_text(TRAIN)
    options = ("-n", "2", "--spares", "1", "--wait", "0")
    command = [
        sys.executable,
        "-m",
        "swift",
        "run",
        *options,
        "train.py",
        str(folder),
        str(dies_at),
    ]
    done = subprocess.run(
        command,
        cwd=folder,
        env=os.environ,
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
    )
    found = [folder / f"rank-{rank}" for rank in range(2)]
    return done, [json.loads(one.read_text()) for one in found if one.exists()]


@pytest.mark.slow
def test_a_run_that_was_killed_whole_resumes_to_the_bit(tmp_path):
    done, undisturbed = train(tmp_path / "undisturbed", -1)
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "killed"
    done, found = train(folder, 6)
    assert done.returncode == 1
    assert found == []
    done, resumed = train(folder, -1)
    assert done.returncode == 0, done.stderr
    assert [first for first, _ in resumed] == [4, 4]
    assert [state for _, state in resumed] == [state for _, state in undisturbed]
