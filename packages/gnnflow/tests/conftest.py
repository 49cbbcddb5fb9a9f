"""Where a graph's queries run: the CPU's code, and the GPU's by Triton's interpreter or on a GPU."""

import pytest
import torch

from shared.kernels.registry import SWITCH


@pytest.fixture(params=["cpu", "cuda", "hybrid"])
def placement(request, monkeypatch):
    return _usable(request.param, monkeypatch)


@pytest.fixture(params=["cuda", "hybrid"])
def gpu_placement(request, monkeypatch):
    return _usable(request.param, monkeypatch)


def _usable(name, monkeypatch):
    if name != "cpu" and not torch.cuda.is_available():
        monkeypatch.setenv(SWITCH, "triton")
    return name


@pytest.fixture
def unchecked():
    """What users run: no types are checked at calls, so that the errors are the package's own."""
    jaxtyping = pytest.importorskip("jaxtyping")
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
