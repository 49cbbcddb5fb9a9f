"""The scripts of examples/ run as their users start them, on their own data too."""

import pickle
import re
import runpy
import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig

from memo.runtime.device_memory import resident_bytes

pytestmark = pytest.mark.unchecked  # a model is trained, and many plans are looked at

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Runs a script in a folder of its own and returns what it printed."""
    monkeypatch.chdir(tmp_path)

    def call(name, *arguments):
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out

    return call


def bytes_of(text):
    return [
        int(one.replace(",", "")) for one in re.findall(r"([\d,]+)(?: bytes|$)", text, re.MULTILINE)
    ]


def test_planned_addresses_take_no_more_than_allocators(run):
    needed, planned, *reserved = bytes_of(run("plan_addresses.py"))
    assert len(reserved) == 3
    assert needed <= planned <= reserved[2] <= min(reserved)


def test_addresses_of_a_step_of_ones_own_are_planned(run):
    step = [
        {"action": action, "addr": address, "size": size, "stream": 0, "frames": [], "time_us": 1}
        for action, address, size in (
            ("alloc", 0x1000, 3 << 20), ("alloc", 0x400000, 1 << 20),
            ("free_completed", 0x1000, 3 << 20), ("alloc", 0x1000, 2 << 20),
        )
    ]  # fmt: skip
    Path("one.pickle").write_bytes(pickle.dumps({"segments": [], "device_traces": [step]}))
    assert bytes_of(run("plan_addresses.py", "one.pickle"))[:2] == [4 << 20, 4 << 20]


@pytest.mark.slow  # blocks of the README and the guide do the same in small
def test_a_text_of_ones_own_is_trained_on_under_a_limit(run):
    Path("text.txt").write_text("one two three four " * 20)
    # Resident before: the limit is the whole process's, and other tests have run in it.
    limit_mib = (resident_bytes(torch.device("cpu")) >> 20) + 100
    options = ["--limit", f"{limit_mib}MiB", "--tokens", "256", "--steps", "4"]
    told = run("train_under_a_limit.py", "text.txt", *options)
    losses = [float(loss) for loss in re.findall(r"^loss ([\d.]+)$", told, re.MULTILINE)]
    assert len(losses) == 4
    assert losses[-1] < losses[0]


@pytest.mark.slow
def test_a_larger_device_fits_longer_texts_of_a_model_of_ones_own(run, tmp_path):
    LlamaConfig(
        hidden_size=1024, intermediate_size=2816, num_hidden_layers=12, num_attention_heads=16
    ).save_pretrained(tmp_path / "model")
    longest = [
        int(re.search(r"longest: ([\d,]+)", run("what_fits.py", *arguments))[1].replace(",", ""))
        for arguments in (("model", "--device", "L4"), ("model", "--device", "H100"), ())
    ]
    assert longest[0] < longest[1]
    assert longest[2] > 0


def test_every_example_is_tested():
    text = Path(__file__).read_text()
    assert [path.name for path in EXAMPLES.glob("*.py") if path.name not in text] == []
