import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

import diffusionpipe as dp

HOME = Path(__file__).parents[1]
EXAMPLES = HOME / "examples"
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def run(words, folder):
    done = subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        check=False,
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def read_losses(text):
    return [float(loss) for loss in re.findall(r"step \d+: loss ([\d.]+)", text)]


@pytest.mark.slow
def test_networks_are_planned_for(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = ["--image-size", "16", "--batch-size", "4", "--rates", "1mbit", "100gbit"]
    monkeypatch.setattr(sys, "argv", ["plan_a_cluster.py", *words])
    runpy.run_path(str(EXAMPLES / "plan_a_cluster.py"), run_name="__main__")
    printed = capsys.readouterr().out
    placements = re.findall(r"^\d+[mg]bit: (\w+), .* \(predicted\)", printed, re.MULTILINE)
    assert placements[0] in ("chain", "folded")
    assert placements[1] in ("data", "chain", "folded")
    assert "Limit: " in printed


@pytest.mark.slow
def test_two_ranks_train_a_pipeline_that_generates(tmp_path):
    from diffusers import StableDiffusionPipeline

    words = ["--image-size", "16", "--batch-size", "4", "--steps", "4", "--placement", "folded"]
    words += ["--cache", "cache"]
    printed = run([*TORCHRUN, EXAMPLES / "train_two_ranks.py", *words], tmp_path)
    assert len(read_losses(printed)) == 4
    # Latents and text states of the profile's batch and of four steps.
    assert len(list((tmp_path / "cache").glob("*/*.safetensors"))) == 2 * 5 * 4
    assert "rank 0 to 1" in printed
    pipeline: Any = StableDiffusionPipeline.from_pretrained(
        tmp_path / "report/diffusionpipe/trained"
    )
    pipeline.set_progress_bar_config(disable=True)
    images = pipeline("a seven", num_inference_steps=1, height=16, width=16, output_type="np")
    assert images.images.shape == (1, 16, 16, 3)


@pytest.mark.slow
def test_the_readmes_script_runs_under_torchrun(tmp_path):
    (script,) = re.findall(
        r"^```py\n(.*?)^```", (HOME / "README.md").read_text(), re.MULTILINE | re.DOTALL
    )
    assert len(script.splitlines()) <= 20
    (tmp_path / "train.py").write_text(script.replace("16", "4").replace(", 10)", ", 3)"))
    printed = run([*TORCHRUN, "train.py"], tmp_path)
    assert printed.count("Limit: ") == 1
    assert (tmp_path / "out/model_index.json").is_file()


def test_preferences_are_trained_as_written_out():
    """Of one process; both terms of a pair are computed one by one."""
    example = runpy.run_path(str(EXAMPLES / "train_preferences.py"))
    job, batches = example["build"](4)
    batch = next(batches)
    job.check(batch)
    with torch.no_grad():
        assert torch.allclose(
            job.compute_loss(batch, seed=3, step=1), torch.tensor(2.0).log(), rtol=1e-5
        )
        for parameter in job.trained.values():
            parameter.add_(0.01 * torch.randn_like(parameter))
        losses = [compute_preference(job, batch, example["BETA"], row) for row in range(4)]
        ours = job.compute_loss(batch, seed=3, step=1)
    assert torch.allclose(ours, torch.stack(losses).mean(), rtol=1e-4)


def compute_preference(job, batch, beta, row):
    """The loss of one pair, by the published formula."""
    from diffusers import DDPMScheduler

    draw = dp.Draw(3, 1, range(row, row + 1))
    noise, time = draw.normal((1, 8, 8)), draw.integers(0, 1000)
    label = job.frozen["label"]({"labels": batch["labels"][row : row + 1]})
    reference = job.frozen["reference"].__closure__
    models = [
        cell.cell_contents for cell in reference if isinstance(cell.cell_contents, torch.nn.Module)
    ]
    (fixed,) = models
    errors = {
        (name, side): functional.mse_loss(
            model(
                DDPMScheduler().add_noise(batch["pairs"][row : row + 1, side], noise, time),
                time,
                encoder_hidden_states=label,
            ).sample,
            noise,
        )
        for name, model in (("ours", job.chains[0].model), ("fixed", fixed))
        for side in (0, 1)
    }
    winner, loser = (errors["ours", side] - errors["fixed", side] for side in (0, 1))
    return -functional.logsigmoid(-0.5 * beta * (winner - loser))


@pytest.mark.slow
def test_preferences_train_on_two_ranks(tmp_path):
    words = ["--steps", "12", "--placement", "folded"]
    losses = read_losses(run([*TORCHRUN, EXAMPLES / "train_preferences.py", *words], tmp_path))
    assert len(losses) == 12
    assert sum(losses[8:]) / 4 < 0.95 * losses[0]


def test_there_are_two_or_three_examples():
    assert 2 <= len(list(EXAMPLES.glob("*.py"))) <= 3
