"""The forms of a kernel as a fixture, each with the device its tensors must lie on."""

from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

import pytest
import torch


@dataclass(frozen=True)
class Forms:
    """Loads one form of any operator; `device` is where that form takes its tensors."""

    name: str
    device: str

    def of(self, kernel: str) -> ModuleType:
        return import_module(f"shared.kernels.{kernel}.{self.name}")


def triton_device() -> str:
    if find_spec("triton") is None:
        pytest.skip("triton is not installed")
    if torch.cuda.is_available():
        return "cuda"
    from triton.runtime.interpreter import InterpretedFunction

    from shared.kernels.philox import gpu

    if not isinstance(gpu.noise_tile, InterpretedFunction):
        pytest.skip("no CUDA device, and triton was imported without TRITON_INTERPRET=1")
    return "cpu"


@pytest.fixture(params=["cpu", "gpu"])
def form(request: pytest.FixtureRequest) -> Forms:
    """The two fast forms; the reference is what they are compared with."""
    return Forms(request.param, "cpu" if request.param == "cpu" else triton_device())


@pytest.fixture
def two_threads(request: pytest.FixtureRequest) -> None:
    # No `yield`: the import hook that checks signatures wraps what lies under shared/, tests too,
    # and pytest no longer sees that a wrapped function is a generator.
    before = torch.get_num_threads()
    request.addfinalizer(lambda: torch.set_num_threads(before))  # noqa: PT021
    torch.set_num_threads(2)
