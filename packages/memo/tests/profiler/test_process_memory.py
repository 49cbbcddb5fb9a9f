"""Bytes that are there throughout a step: what is resident, and what is still to come."""

import pytest
import torch

from memo.profiler import process_memory
from memo.profiler.process_memory import fixed_bytes

from ..runtime.models import make_stack

MiB = 1 << 20


@pytest.fixture
def model(monkeypatch):
    monkeypatch.setattr(process_memory, "resident_bytes", lambda _: 1000 * MiB)
    monkeypatch.setattr(process_memory, "hole_bytes", lambda: 30 * MiB)
    return make_stack()


def test_gradients_and_states_of_trained_parameters_are_to_come(model):
    held, beside = 1000 * MiB, (30 + 8) * MiB
    parameters = sum(one.nbytes for one in model.parameters())
    assert fixed_bytes(model) == held + beside + 3 * parameters
    assert fixed_bytes(model, 12345) == held + beside + parameters + 12345
    for one in model.layers.parameters():
        one.requires_grad_(False)
    trained = sum(one.nbytes for one in model.parameters() if one.requires_grad)
    assert 0 < trained < parameters
    assert fixed_bytes(model) == held + beside + 3 * trained
    for one in model.parameters():
        if one.requires_grad:
            one.grad = torch.zeros_like(one)  # resident already
    assert fixed_bytes(model) == held + beside + 2 * trained
    assert fixed_bytes(model, 0) == held + beside
