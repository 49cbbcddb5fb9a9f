"""The command line answers at once, teaches, and says what is wrong."""

import json
import subprocess
import sys

import pytest

from hybridflow.cli import main


def test_help_imports_no_torch():
    code = (
        "import sys; from hybridflow.cli import main\n"
        "try: main(['--help'])\nexcept SystemExit: pass\n"
        "assert 'torch' not in sys.modules and 'ray' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "hybridflow train grpo-sort" in done.stdout


@pytest.mark.parametrize("command", ["train", "map", "plan", "bench", "demo"])
def test_each_subcommand_has_an_example(command, capsys):
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert ended.value.code == 0
    assert f"hybridflow {command}" in capsys.readouterr().out


def test_plan_prints_groups_and_bytes(capsys):
    assert main(["plan", "1-4-2", "1-2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["micro_dp"] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert found["tp"] == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert len(set(found["received_bytes"])) == 1
    assert main(["plan", "1-4-2", "1-2"]) == 0
    assert "receives" in capsys.readouterr().out


def test_map_explains_its_choice(capsys):
    assert main(["map", "--gpus", "8", "--algorithm", "grpo"]) == 0
    assert "actor" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["plan", "1-3-2", "1-2"], "tensor shards do not divide"),
        (["plan", "1-4", "1-2"], "expected a layout p-t-d"),
        (
            ["plan", "1-4-2", "1-2", "--model", "nowhere"],
            "nowhere: expected a model's folder with config.json, or config:NAME",
        ),
        (["map", "--device", "H1000"], "device: expected one of"),
        (["map", "--gpus", "12"], "expected whole hosts"),
        (
            ["train", "nothing"],
            "nothing: expected a recipe as YAML, or one of cispo-sort, dr-grpo-sort",
        ),
        (["train", "grpo-sort", "--set", "steps"], "expected KEY=VALUE"),
        (
            ["train", "grpo-sort", "--set", "steps=0", "--set", "seed=1"],
            "steps: expected 1 or more",
        ),
    ],
)
def test_mistakes_end_with_one_line_and_status_1(arguments, told, capsys):
    assert main(arguments) == 1
    error = capsys.readouterr().err
    assert error.startswith("hybridflow: ")
    assert told in error
