"""The scripts of examples/ run as their users start them, and print results that make sense."""

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from llmpq import Plan

from .runtime.tiny_models import WORDS, add_tokenizer, make

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A model whose tokenizer knows a few words."""
    return add_tokenizer(make("llama", tmp_path_factory.mktemp("model")))


def test_bits_are_chosen_for_a_size(model, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text(" ".join(WORDS * 20))
    script = EXAMPLES / "choose_bits_for_a_size.py"
    found = []
    for megabytes in ("0.07", "0.11"):
        argv = [script.name, str(model), "text.txt", "--megabytes", megabytes, "--group-size", "16"]
        monkeypatch.setattr(sys, "argv", argv)
        runpy.run_path(str(script), run_name="__main__")
        text = capsys.readouterr().out
        held = float(re.search(r"^([\d.]+) MB$", text, re.MULTILINE)[1])
        assert held <= float(megabytes) + 0.05
        found.append(float(re.search(r"^([\d.e-]+) nats a token expected", text, re.MULTILINE)[1]))
        assert len(Plan.load("report/llmpq/plan.json").bits) == 5
    assert found[1] < found[0], "more bytes lose less"


@pytest.mark.slow
def test_ranks_answer(model, tmp_path):
    command = [
        "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
        str(EXAMPLES / "generate_on_ranks.py"), str(model), "--bits", "16", "--new-tokens", "4",
    ]  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", *command],
        check=False,
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"^rank \d read [\d.]+ MB of weights$", done.stdout, re.MULTILINE)) == 2
    assert "The capital of France is" in done.stdout
