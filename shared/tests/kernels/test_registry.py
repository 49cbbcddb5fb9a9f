import logging
import os
import subprocess
import sys

import pytest
import torch

from shared.errors import ConfigError
from shared.kernels import registry
from shared.kernels.registry import KERNELS, SWITCH, Kernel, select


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    monkeypatch.delenv(SWITCH, raising=False)
    monkeypatch.setattr(registry, "chosen_forms", {})


@pytest.mark.parametrize("name", sorted(KERNELS))
def test_cpu_tensors_get_the_cpu_form_by_default(name):
    assert select(name, "cpu").__name__ == f"shared.kernels.{name}.cpu"


@pytest.mark.parametrize(("forced", "module"), [("reference", "reference"), ("cpu", "cpu")])
def test_the_switch_forces_a_form(monkeypatch, forced, module):
    monkeypatch.setenv(SWITCH, forced)
    assert select("quantize", torch.device("cpu")).__name__.endswith(f".{module}")


def test_the_switch_is_read_at_every_call(monkeypatch):
    first = select("quantize", "cpu")
    monkeypatch.setenv(SWITCH, "reference")
    assert select("quantize", "cpu") is not first


def test_the_choice_is_logged_once(caplog):
    with caplog.at_level(logging.INFO, logger="shared.kernels.registry"):
        select("gather", "cpu")
        select("gather", "cpu")
    assert [record.message for record in caplog.records] == ["kernel gather on cpu: the cpu form"]


def test_an_unknown_kernel_is_refused_with_the_known_names():
    with pytest.raises(ConfigError, match=r"'gather', 'neighbors', 'quantize'.*got 'softmax'"):
        select("softmax", "cpu")


def test_an_unknown_form_is_refused_with_the_known_ones(monkeypatch):
    monkeypatch.setenv(SWITCH, "cuda")
    with pytest.raises(ConfigError, match="reference, cpu, triton, got 'cuda'"):
        select("quantize", "cpu")


def test_the_cpu_form_is_refused_for_tensors_elsewhere(monkeypatch):
    monkeypatch.setenv(SWITCH, "cpu")
    with pytest.raises(ConfigError, match="lie on cuda"):
        select("quantize", "cuda")


def test_a_form_that_cannot_be_imported_says_what_is_missing():
    kernel = Kernel("odd", "json", "shared.kernels.no_such_module", "json")
    with pytest.raises(ConfigError, match=r"cpu form of odd cannot be loaded.*no_such_module"):
        select(kernel, "cpu")


@pytest.mark.slow
def test_triton_on_cpu_tensors_needs_the_interpreter():
    script = (
        "from shared.kernels.registry import select\n"
        "from shared.errors import ConfigError\n"
        "try:\n    select('gather', 'cpu')\n"
        "except ConfigError as error:\n    print(error)\n"
    )
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {SWITCH: "triton"}
    done = subprocess.run(
        [sys.executable, "-c", script],
        check=False,
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "expected CUDA tensors" in done.stdout, done.stderr
    assert "TRITON_INTERPRET=1" in done.stdout
