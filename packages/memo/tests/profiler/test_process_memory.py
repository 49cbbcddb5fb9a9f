"""Bytes that are there throughout a step: what is resident, and what is still to come."""

import pytest
import torch

from memo.profiler import process_memory
from memo.profiler.process_memory import bytes_to_come, fixed_bytes

from ..runtime.models import make_stack

MiB = 1 << 20


@pytest.fixture
def model(monkeypatch):
    monkeypatch.setattr(process_memory, "resident_bytes", lambda _: 1000 * MiB)
    monkeypatch.setattr(process_memory, "hole_bytes", lambda: 30 * MiB)
    return make_stack()


def test_gradients_and_states_of_trained_parameters_are_to_come(model):
    assert fixed_bytes(torch.device("cpu")) == (1000 + 30 + 8) * MiB
    parameters = sum(one.nbytes for one in model.parameters())
    assert bytes_to_come(model) == 3 * parameters
    assert bytes_to_come(model, 12345) == parameters + 12345
    for one in model.layers.parameters():
        one.requires_grad_(False)
    trained = sum(one.nbytes for one in model.parameters() if one.requires_grad)
    assert 0 < trained < parameters
    assert bytes_to_come(model) == 3 * trained
    for one in model.parameters():
        if one.requires_grad:
            one.grad = torch.zeros_like(one)  # resident already
    assert bytes_to_come(model) == 2 * trained
    assert bytes_to_come(model, 0) == 0
