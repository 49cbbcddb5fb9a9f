import json
import subprocess
import sys
from pathlib import Path

import pytest

from diffusionpipe.cli import main
from shared.topology import Cluster, Link
from shared.topology.device import CPU
from shared.units import Mbps


@pytest.fixture
def files(tmp_path):
    """A profile of eight made layers, and a cluster of two hosts."""
    from diffusionpipe.profiler.job_profile import ChainProfile, JobProfile

    layers = 8
    keys = [f"h{i}" for i in range(layers - 1)] + ["output"]
    chain = ChainProfile(
        layers=tuple(keys),
        reads=(("x",), *((key,) for key in keys[:-1])),
        writes=tuple((key,) for key in keys),
        differentiable=tuple(keys),
        feeds={"x": ("z",), "target": ("z",)},
        forward_s=((0.01, 0.08),) * layers,
        backward_s=((0.02, 0.16),) * layers,
        parameter_bytes=(6_000_000,) * layers,
        gradient_bytes=(6_000_000,) * layers,
        saved_bytes=(1000,) * layers,
        value_bytes={**dict.fromkeys(keys, 1000), "x": 1000, "target": 1000},
    )
    profile = JobProfile(
        sizes=(1, 8),
        chains=(chain,),
        frozen_s={"z": (0.1, 0.8)},
        frozen_outputs={"z": ("z",)},
        frozen_bytes={"z": 100},
        frozen_parameter_bytes={"z": 1000},
        step_s_per_byte=1e-10,
        self_conditioning=0.0,
        device="made",
        num_ranks=1,
    )
    profile.save(tmp_path / "profile.json")
    cluster = Cluster.uniform(2, 1, CPU, network=Link.from_rate(100 * Mbps, alpha_s=1e-4))
    cluster.to_yaml(tmp_path / "cluster.yaml")
    return tmp_path


def options(folder):
    return [
        "--profile", str(folder / "profile.json"), "--cluster", str(folder / "cluster.yaml"),
    ]  # fmt: skip


def test_plan_explains_and_trace_draws_it(files, capsys):
    out = files / "plan.json"
    argv = ["plan", *options(files), "--batch-size", "16", "--out", str(out)]
    assert main(argv) == 0
    printed = capsys.readouterr().out
    assert "Runner-up: " in printed
    assert f"written to {out}" in printed
    assert main([*argv, "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["placement"] in ("chain", "folded")
    argv = ["trace", *options(files), "--plan", str(out), "--out", str(files / "step.json")]
    assert main(argv) == 0
    events = json.loads((files / "step.json").read_text())["traceEvents"]
    assert {event.get("cat") for event in events} >= {"forward", "backward", "encode", "step"}
    assert (files / "step.svg").stat().st_size > 1000


def test_compare_has_a_row_for_each_placement(files, capsys):
    assert main(["compare", *options(files), "--batch-size", "16", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["plans"]
    assert [row["placement"] for row in rows] == ["data", "chain", "folded"]
    assert all(row["filled_s"] <= row["first_s"] for row in rows)


def test_simulate_prints_the_closed_form(capsys):
    argv = ["simulate", "--forward", "1", "1", "--backward", "2", "2", "--num-micro-batches", "2"]
    assert main([*argv, "--frozen", "6", "--job", "1", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["makespan_s"] == 9
    assert record["in_flight"] == [2, 1]
    assert main([*argv, "--fill", "last"]) == 1
    assert "fill: expected one of first, owned, paper" in capsys.readouterr().err


def test_missing_files_are_named(files, capsys):
    argv = ["plan", "--profile", "none.json", "--cluster", str(files / "cluster.yaml")]
    assert main([*argv, "--batch-size", "16"]) == 1
    assert "none.json" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["profile", "train"])
def test_a_build_that_is_missing_is_named(command, capsys, tmp_path):
    argv = [command, "--build", f"{tmp_path}/none.py:build"]
    argv += ["--num-steps", "1"] if command == "train" else []
    assert main(argv) == 1
    assert "build: expected module:function or file.py:function" in capsys.readouterr().err


@pytest.mark.parametrize("argv", [["demo", "--fast"], ["plan", "--batch-size", "many"]])
def test_wrong_usage_is_status_2(argv):
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert caught.value.code == 2


def test_help_imports_neither_torch_nor_diffusers():
    code = (
        "import sys; from diffusionpipe.cli import main\n"
        "try: main(['--help'])\nexcept SystemExit: pass\n"
        "assert not {'torch', 'diffusers', 'transformers', 'numba'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


JOBS = """
import torch
from torch import nn

import diffusionpipe as dp


def build(**options):
    torch.manual_seed(0)
    inputs = lambda batch, frozen, draw: {"sample": frozen["z"], "target": batch["x"]}
    loss = lambda output, target: (output - target).square().mean(1)
    layers = [nn.Linear(4, 4, **options), nn.Tanh()]
    job = dp.Job(dp.chain(layers), {"z": lambda b: b["x"] * 2}, inputs, loss)
    return job, [{"x": torch.randn(8, 4)} for _ in range(3)]


def build_unlike():
    return build(bias=False)


def stop():
    raise ValueError("no disk")


def give_nothing():
    return build()[0], []
"""


def test_a_job_is_profiled_planned_and_trained(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "jobs.py").write_text(JOBS)
    assert main(["profile", "--build", "jobs.py:build", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["trained_s"] > record["frozen_s"] > 0
    Cluster.uniform(1, 1, CPU).to_yaml(tmp_path / "cluster.yaml")
    assert main(["plan", "--cluster", "cluster.yaml", "--batch-size", "8"]) == 0
    capsys.readouterr()
    argv = ["train", "--build", "jobs.py:build", "--num-steps", "3", "--learning-rate", "0.1"]
    assert main([*argv, "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert len(record["losses"]) == 3
    assert (tmp_path / record["out"] / "model.safetensors").is_file()


def test_training_refuses_a_plan_of_another_job(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "jobs.py").write_text(JOBS)
    Cluster.uniform(1, 1, CPU).to_yaml(tmp_path / "cluster.yaml")
    assert main(["profile", "--build", "jobs.py:build"]) == 0
    assert main(["plan", "--cluster", "cluster.yaml", "--batch-size", "8"]) == 0
    capsys.readouterr()
    assert main(["train", "--build", "jobs.py:build_unlike", "--num-steps", "1"]) == 1
    assert "plan: expected one made for this job (" in capsys.readouterr().err
    assert not (tmp_path / "report/diffusionpipe/trained").exists()


def test_errors_of_a_users_build_stay_what_they_are(tmp_path, capsys):
    (tmp_path / "jobs.py").write_text(JOBS)
    with pytest.raises(ValueError, match="no disk"):
        main(["profile", "--build", f"{tmp_path}/jobs.py:stop"])
    assert main(["profile", "--build", f"{tmp_path}/jobs.py:give_nothing"]) == 1
    assert "expected a batch to measure with, got none" in capsys.readouterr().err


def test_compare_says_why_a_placement_has_no_plan(files, capsys):
    argv = ["compare", *options(files), "--batch-size"]
    assert main([*argv, "3"]) == 0
    printed = capsys.readouterr().out
    assert "No plan of placement data: batch_size: expected one that micro-batches" in printed
    assert main([*argv, "0"]) == 1
    assert "batch_size: expected 1 or more, got 0" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("build", "num_steps", "told"),
    [("build", "0", "num_steps: expected 1 or more, got 0"), ("give_nothing", "1", "got none")],
)
def test_training_of_no_step_writes_no_model(build, num_steps, told, tmp_path, capsys):
    (tmp_path / "jobs.py").write_text(JOBS)
    files = {
        name: str(tmp_path / f"{name}.{end}")
        for name, end in (("profile", "json"), ("plan", "json"), ("cluster", "yaml"))
    }
    Cluster.uniform(1, 1, CPU).to_yaml(Path(files["cluster"]))
    assert main(["profile", "--build", f"{tmp_path}/jobs.py:build", "--out", files["profile"]]) == 0
    argv = ["--profile", files["profile"], "--cluster", files["cluster"], "--out", files["plan"]]
    assert main(["plan", *argv, "--batch-size", "8"]) == 0
    argv = ["train", "--build", f"{tmp_path}/jobs.py:{build}", "--num-steps", num_steps]
    assert main([*argv, "--plan", files["plan"], "--out", str(tmp_path / "out")]) == 1
    assert told in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_plan_of_another_cluster_or_job_is_not_drawn(files, capsys):
    out = str(files / "plan.json")
    assert main(["plan", *options(files), "--batch-size", "16", "--out", out]) == 0
    argv = ["trace", *options(files), "--plan", out, "--out", str(files / "step.json")]
    Cluster.uniform(1, 4, CPU).to_yaml(files / "cluster.yaml")
    assert main(argv) == 1
    assert "cluster.yaml: expected the 2 ranks of" in capsys.readouterr().err
    Cluster.uniform(2, 1, CPU).to_yaml(files / "cluster.yaml")
    text = (files / "profile.json").read_text()
    (files / "profile.json").write_text(text.replace('"z": [', '"other": ['))
    assert main(argv) == 1
    assert "profile.json: expected the layers and frozen parts of" in capsys.readouterr().err
    assert not (files / "step.json").exists()


def test_a_script_may_import_what_lies_beside_it(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "beside_jobs.py").write_text(JOBS)
    (tmp_path / "script_of_jobs.py").write_text("from beside_jobs import build")
    argv = ["profile", "--build", f"{tmp_path}/script_of_jobs.py:build"]
    assert main([*argv, "--out", str(tmp_path / "profile.json")]) == 0
