"""What templates load before ranks are forked from them."""

import importlib
import selectors
import subprocess
import sys
from contextlib import ExitStack
from unittest.mock import patch

import pytest

from swift.membership import supervisor
from swift.membership.settings import Launch
from swift.membership.supervisor import Local
from swift.undo import machine_code

COUNTS = """
import sys
import torch
import swift
import shared.kernels.digest.cpu
from shared.kernels.adam import cpu as adam
from shared.kernels.digest import digest
from swift.undo import machine_code

def kernels():
    found = [one for module in (adam, sys.modules["shared.kernels.digest.cpu"]) for one in vars(module).values()]
    return sum(len(one.signatures) for one in found if hasattr(one, "signatures"))

before = kernels()
model = torch.nn.Linear(3, 2)
model(torch.ones(1, 3)).sum().backward()
optimizer = swift.undoable(torch.optim.AdamW(model.parameters()))
optimizer.step()
optimizer.undo()
digest(model.weight)
print(before, kernels())
"""


def test_a_gpu_is_not_looked_for_as_code_is_loaded_that_is_forked():
    # It would fail all processes that are forked afterwards.
    names = ("cuda.is_available", "cuda.device_count", "cuda.init", "optim.AdamW.step")
    with ExitStack() as stack:
        called = [stack.enter_context(patch(f"torch.{name}")) for name in names]
        # Together, as an undo without its step has nothing to undo.
        ran = [
            stack.enter_context(patch(f"shared.kernels.adam.{name}")) for name in ("step", "undo")
        ]
        importlib.reload(machine_code)
    assert all(one.called for one in ran)
    assert not any(one.called for one in called)


def test_a_kernel_that_fails_is_left_to_the_ranks_to_say():
    with patch("shared.kernels.adam.step", side_effect=RuntimeError("no such form")) as step:
        importlib.reload(machine_code)
    assert step.called


@pytest.mark.slow
def test_the_first_step_of_adamw_and_its_undo_load_nothing_more():
    told = subprocess.run(
        [sys.executable, "-c", COUNTS], capture_output=True, text=True, check=True, timeout=300
    ).stdout.split()
    assert told[0] == told[1] != "0"


@pytest.mark.parametrize(
    "cap", [{}, {"ATEN_CPU_CAPABILITY": "avx2"}, {"NUMBA_CPU_NAME": "haswell"}]
)
def test_templates_load_it_unless_the_user_caps_the_instruction_set(monkeypatch, cap):
    asked, limits_s = [], []

    def fork(control, args, env, limit_s, *, modules, **more):
        asked.append(modules)
        limits_s.append(limit_s)

    monkeypatch.setattr(supervisor, "fork", fork)
    launch = Launch(
        script=(__file__,), host=0, ranks=(0,), num_spares=0, world_size=1, heartbeat_s=1.0,
        preload=("json",), env=cap,
    )  # fmt: skip
    with selectors.DefaultSelector() as selector:
        local = Local(launch, selector)
        for _ in range(2):
            with pytest.raises(supervisor.ConfigError, match="one more process"):
                local.start(0)
    assert limits_s == [300.0, 60.0], "the first may compile"
    assert ("swift.undo.machine_code" in asked[0]) == (not cap)
    assert "json" in asked[0]
