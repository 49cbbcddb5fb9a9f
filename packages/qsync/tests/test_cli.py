import json
from pathlib import Path

import pytest

from qsync import Plan
from qsync.cli import main

_JOB = """
from __future__ import annotations

from dataclasses import dataclass

import torch
from neighbour_of_job import DIM
from torch import nn


@dataclass
class Size:
    dim: int = DIM


def build():
    torch.manual_seed(0)
    dim = Size().dim
    model = nn.Sequential(nn.Linear(6, dim), nn.Tanh(), nn.Linear(dim, 2))
    return model, [torch.randn(5, 6)], lambda model, batch: model(batch).square().mean()


def forget():
    return nn.Linear(2, 2)
"""


@pytest.fixture
def job(tmp_path):
    path = tmp_path / "training_job.py"
    path.write_text(_JOB)
    (tmp_path / "neighbour_of_job.py").write_text("DIM = 8")
    return path


def test_a_plan_is_written_and_explained(job, tmp_path, capsys):
    out = tmp_path / "plans" / "plan.json"
    arguments = ["plan", "--build", f"{job}:build", "--target-time", "100x", "--out", str(out)]
    assert main(arguments) == 0
    assert "all 2 operators stay in float32" in capsys.readouterr().out
    assert list(Plan.load(out).operators) == ["0", "2"]
    assert main([*arguments, "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["is_target_met"]
    assert record["lowered"] == [{}]


def test_modules_are_found_in_the_working_directory(job, monkeypatch, capsys):
    monkeypatch.chdir(job.parent)
    assert main(["sensitivity", "--build", "training_job:build", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["method"] == "probe"
    assert record["noise"]["0"]["int8"] > record["noise"]["0"]["fp32"] == 0


def test_profile_prints_a_row_for_each_operator(job, capsys):
    arguments = ["profile", "--build", f"{job}:build", "--precisions", "bf16"]
    assert main(arguments) == 0
    rows = capsys.readouterr().out.splitlines()
    assert sum(" ms " in row or " us " in row for row in rows) == 2
    assert main([*arguments, "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert set(record["forward_s"]["2"]) == {"bf16", "fp32"}


@pytest.mark.parametrize(
    ("build", "message"),
    [
        ("build", "expected module:function or file.py:function, got 'build'"),
        ("training_job_x:build", "No module named 'training_job_x'"),
        ("{job}:built", "no attribute 'built'"),
        ("{job}x.py:build", "No such file"),
        (
            "{job}:forget",
            "expected forget() to return model, batches and loss function, got Linear",
        ),
    ],
)
def test_functions_that_build_no_job_are_named(job, build, message, capsys):
    assert main(["plan", "--build", build.format(job=job)]) == 1
    assert message in capsys.readouterr().err


TRACES = [str(Path(__file__).parent / f"diagnosis/assets/rank{rank}.json.gz") for rank in (0, 1)]


def test_traces_are_diagnosed_and_advice_given(capsys):
    assert main(["diagnose", *TRACES, "--advise"]) == 0
    text = capsys.readouterr().out
    assert "Waiting for rank 1 in each step: rank 0" in text
    assert "1. run AddmmBackward0, aten::linear of rank 1" in text
    assert main(["diagnose", *TRACES, "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["slowest_rank"] == 1
    assert record["causes"][0]["kind"] == "slow rank"
    assert "advice" not in record


def test_replay_predicts_a_change_and_draws_both(tmp_path, capsys):
    out = tmp_path / "new" / "both.json"
    change = ["--rank-speed", "1=2", "--operator-speed", "aten::gelu=1.5", "--bucket", "1MiB"]
    assert main(["replay", *TRACES, *change, "--out", str(out), "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["changed_s"] < 0.9 * record["replayed_s"]
    assert json.loads(out.read_text())["traceEvents"]
    assert main(["replay", *TRACES]) == 0
    assert "1.00 times as fast" in capsys.readouterr().out


def test_wrong_traces_and_changes_are_one_sentence(capsys):
    assert main(["diagnose", TRACES[1]]) == 1
    assert "expected those of all ranks, at least two files" in capsys.readouterr().err
    assert main(["replay", *TRACES, "--rank-speed", "one=2"]) == 1
    assert "rank_speed: expected a name and its factor" in capsys.readouterr().err


@pytest.mark.parametrize("argv", [["demo", "--fast"], ["plan"], ["plan", "--build"]])
def test_wrong_usage_is_status_2(argv):
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert caught.value.code == 2
