"""The command line end to end: partition, train, interrupt, resume, plan, probe, bench."""

import io
import json
import re
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout

import pytest

from adaqp import LinkTable, commands
from adaqp.cli import main
from adaqp.partitioning.partitioner import partition
from adaqp.training.config import ModelConfig, PolicyConfig, RunConfig
from shared.errors import ConfigError, DataError


def run_here(*args, expect=0):
    """What the command line prints when it runs in this process, with its exit status checked."""
    text = io.StringIO()
    with redirect_stdout(text), redirect_stderr(text):
        try:
            status = main([*map(str, args)])
        except SystemExit as ended:
            status = ended.code
    assert status == expect, text.getvalue()
    return text.getvalue()


def adaqp_cli(*args, expect=0):
    """What the command line prints as a process of its own, with its exit status checked."""
    done = subprocess.run(
        [sys.executable, "-m", "adaqp", *map(str, args)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == expect, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cli") / "parts"
    text = run_here("partition", "sbm", "--num-nodes", 4000, "--out", folder, "--parts", 2)
    assert "edges cut" in text
    return folder


def test_help_does_not_import_torch():
    script = "import sys, adaqp.cli; assert not {'torch', 'numba', 'scipy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.slow
def test_a_run_that_was_interrupted_continues_and_ends_where_one_run_does(parts, tmp_path):
    links = tmp_path / "links.json"
    links.write_text(LinkTable.uniform(2, 12.5e6, 2e-4).to_json())
    common = ("--model.hidden", 16, "--eval-every", 0, "--save-every", 3, "--links", links)
    whole, pieces = tmp_path / "whole.json", tmp_path / "pieces.json"
    adaqp_cli("train", parts, "--epochs", 9, "--history", whole, *common)
    saved = ("--checkpoint", tmp_path / "saved")
    adaqp_cli("train", parts, "--epochs", 6, *saved, *common)
    text = adaqp_cli("train", parts, "--epochs", 9, "--history", pieces, *saved, *common)
    assert "epoch 9:" in text
    losses = json.loads(whole.read_text())["loss"]
    assert len(losses) == 9
    assert json.loads(pieces.read_text())["loss"] == losses, "epochs before the resume too"


@pytest.mark.slow
def test_plan_bench_and_probe_print_tables(parts, tmp_path):
    text = adaqp_cli("plan", parts, "--rate", "100mbit", "--model.hidden", 16)
    assert "adaptive" in text
    assert "fixed 2 bits" in text
    links = tmp_path / "links.json"
    assert "Mbit/s" in adaqp_cli("probe-links", "--ranks", 2, "--out", links, "--budget-s", 0.5)
    assert "adaptive" in adaqp_cli("plan", parts, "--links", links, "--model.hidden", 16)
    text = adaqp_cli(
        "bench",
        parts,
        "--policies",
        "exact-no-overlap",
        "fixed",
        "--epochs",
        3,
        "--model.hidden",
        16,
    )
    assert "exact no overlap" in text
    assert "fixed 4 bits" in text


def test_errors_say_what_to_do_and_exit_1(parts, tmp_path):
    text = run_here("train", tmp_path / "nowhere", expect=1)
    assert "holds no partition; make one: adaqp partition" in text
    text = run_here("partition", tmp_path / "graph.xyz", "--out", tmp_path / "p", expect=1)
    assert text.startswith("adaqp: ")
    assert "Traceback" not in text
    run_here("train", parts, "--epoch", 3, expect=2)


def test_an_error_of_a_process_is_one_sentence_and_status_1(tmp_path):
    text = adaqp_cli("train", tmp_path / "nowhere", expect=1)
    assert text.startswith("adaqp: ")
    assert text.count("\n") == 1


def test_settings_of_a_command_line_are_refused_in_one_sentence(parts):
    text = run_here("train", parts, "--epochs", 0, expect=2)
    assert text == ("adaqp: epochs, eval_every: expected 1 or more and 0 or more, got 0 and 10\n")
    text = run_here("train", parts, "--model.dropout", 1, expect=2)
    assert text == "adaqp: model.dropout: expected a share in [0, 1), got 1.0\n"


@pytest.fixture(scope="module")
def one_part(tmp_path_factory, sbm):
    folder = tmp_path_factory.mktemp("cli") / "one"
    partition(sbm, 1, method="random", out=folder)
    return folder


def test_a_resumed_run_says_from_where(one_part, tmp_path):
    argv = ("train", one_part, "--model.hidden", 8, "--checkpoint", tmp_path / "run1", "--epochs")
    assert "resumed" not in run_here(*argv, 2)
    text = run_here(*argv, 3)
    assert text.startswith(f"adaqp: resumed from step 2 of {tmp_path}/run1\nepoch 3: ")


def test_a_checkpoint_of_another_width_is_one_sentence_of_all_ranks(parts, tmp_path):
    argv = ("train", parts, "--epochs", 1, "--checkpoint", tmp_path / "run1", "--model.hidden")
    run_here(*argv, 8)
    assert run_here(*argv, 12, expect=1) == (
        f"adaqp: {tmp_path}/run1: expected model.0.weight of shape [128, 12] as in this run, got "
        "shape [128, 8]; resume with the model's settings that it was written with, or give "
        "another folder\n"
    )


@pytest.mark.parametrize("bits", [2, 32])
def test_a_learning_rate_that_diverges_is_told_with_the_epoch(parts, bits):
    argv = ("--policy.name", "fixed", "--policy.width", bits, "--lr", 1e30, "--epochs", 9)
    text = run_here("train", parts, *argv, expect=1)
    assert re.fullmatch(r"adaqp: epoch \d: .*lower the learning rate.*\n", text), text
    assert ("expected a finite loss, got nan" in text) == (bits == 32)


def test_a_full_disk_is_one_sentence_of_all_ranks(parts, small_disk):
    folder = small_disk(65_536) / "run1"
    argv = ("--model.hidden", 64, "--epochs", 1, "--checkpoint", folder)
    text = run_here("train", parts, *argv, expect=1)
    assert re.fullmatch(
        rf"adaqp: {folder}: expected room on the disk for what is written there, got [\d,]+ bytes "
        r"free; free some, or write to another disk\n",
        text,
    ), text


def test_settings_out_of_range_are_refused():
    with pytest.raises(ConfigError, match="epochs, eval_every: expected 1 or more"):
        RunConfig(epochs=0)
    with pytest.raises(ConfigError, match="lr: expected a learning rate above 0, got -1"):
        RunConfig(lr=-1.0)
    with pytest.raises(ConfigError, match=r"model\.dropout: expected a share in"):
        ModelConfig(dropout=1.0)


def test_jobs_refuse_what_cannot_be_done(parts, tmp_path, monkeypatch):
    config = RunConfig(epochs=1)
    with pytest.raises(ConfigError, match="save_every: expected 1 or more epochs, got 0"):
        commands.train(parts, config, tmp_path / "saved", 0, None, None)
    with pytest.raises(DataError, match=r"nowhere\.json is no file; write one with"):
        commands.train(parts, config, None, 50, None, tmp_path / "nowhere.json")
    with pytest.raises(ConfigError, match=r"bench needs an epoch and a policy, got 0 and 1"):
        commands.bench(parts, ModelConfig(), [PolicyConfig()], 0, None)
    with pytest.raises(ConfigError, match="ranks: expected 2 or more, got 1"):
        commands.probe_links(1, None, 1.0, None)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="--rate builds hosts of its own"):
        commands.bench(parts, ModelConfig(), [PolicyConfig()], 3, "100mbit")


def test_one_part_has_no_plan(tmp_path, sbm):
    partition(sbm, 1, method="random", out=tmp_path / "one")
    with pytest.raises(DataError, match="expected 2 or more parts, got 1"):
        commands.plan(tmp_path / "one", ModelConfig(), None, None, 0.2)
