import json
import subprocess
import sys

import numpy as np
import pytest

import gnnflow as gf
from gnnflow.cli import main


def test_help_teaches_every_command_with_an_example(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["--help"])
    assert stopped.value.code == 0
    text = capsys.readouterr().out
    for command in ("train", "continual", "partition", "bench", "info", "demo"):
        assert f"Example: gnnflow {command}" in text
    assert "Exit status" in text


def test_help_does_not_import_torch():
    program = (
        "import sys; from gnnflow.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: print('heavy', sorted({'torch', 'numpy', 'matplotlib'} & {*sys.modules}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.endswith("heavy []\n")


def test_continual_writes_rounds_and_a_page(tmp_path, capsys):
    out = tmp_path / "report"
    arguments = ["continual", "zipf:60:900", "--every", "300", "--dim", "16", "--fanouts", "4", "4"]
    assert main([*arguments, "--out", str(out)]) == 0
    assert "rounds, mean AP" in capsys.readouterr().out
    rounds = json.loads((out / "rounds.json").read_text())
    assert sum(one["num_events"] for one in rounds) == 630
    assert "<svg" in (out / "continual.svg").read_text()
    assert "data:image/svg" in (out / "continual.html").read_text()


@pytest.mark.parametrize("model", ["tf-tgn", "tgat"])
def test_train_prints_both_halves(model, capsys):
    arguments = ["train", "zipf:60:600", "--model", model, "--dim", "16", "--epochs", "1"]
    fanouts = ["4"] if model == "tf-tgn" else ["4", "4"]
    assert main([*arguments, "--fanouts", *fanouts]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["half 1", "half 2"]


def test_partition_writes_a_part_for_every_node(tmp_path, capsys):
    out = tmp_path / "parts.npy"
    assert main(["partition", "zipf:50:500", "--parts", "3", "--out", str(out)]) == 0
    assert np.load(out).shape == (50,)
    assert set(np.load(out).tolist()) <= {0, 1, 2}
    assert capsys.readouterr().out


def test_info_and_bench(tmp_path, capsys):
    assert main(["info", "zipf:50:500"]) == 0
    assert "500 events" in capsys.readouterr().out
    graph = gf.TemporalGraph()
    graph.add_edges([0], [1], [2])
    graph.save(tmp_path / "g.safetensors")
    assert main(["info", str(tmp_path / "g.safetensors")]) == 0
    assert "num_edges=1" in capsys.readouterr().out
    assert main(["bench", "zipf:50:500"]) == 0
    assert "M events/s" in capsys.readouterr().out


@pytest.mark.parametrize("args", [["info", "zipf:5"], ["info", "no/such/file.csv"]])
def test_what_cannot_be_done_says_why(args, capsys):
    assert main(args) == 1
    assert capsys.readouterr().err.startswith("gnnflow: ")


@pytest.mark.parametrize("args", [[], ["grow"], ["partition", "zipf:5:5"], ["demo", "--fast"]])
def test_wrong_usage(args):
    with pytest.raises(SystemExit) as stopped:
        main(args)
    assert stopped.value.code == 2
