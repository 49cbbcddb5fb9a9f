"""Mode "whole": storages are kept once, and saved views come back over the same memory."""

import pytest
import torch
from torch import nn

from memo import Plan, apply
from memo.planner.layer_plan import LayerPlan

from .models import assert_same_step, make_stack, train_stack

pytestmark = pytest.mark.unchecked  # models are trained

WHOLE = Plan(layers=(LayerPlan(mode="whole"),))


class Transposes(nn.Module):
    """Saves a matrix and its transpose: two views of one memory."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(32, 32)

    def forward(self, x):
        y = self.up(x)
        return x + (y @ y.transpose(1, 2) @ y) / 100


class Slices(nn.Module):
    """Saves parts of one result that overlap, of other types and strides."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(32, 64)

    def forward(self, x):
        y = self.up(x)
        left, right, middle = y[..., :32], y[..., 32:], y[..., 16:48]
        every = y[:, ::2].repeat_interleave(2, 1)[..., :32]
        mask = y[..., 1:33] > 0
        return x + left.sigmoid() * right * middle * every * mask * left.to(torch.float64).float()


class Expands(nn.Module):
    """Saves a tensor whose elements share memory, and one in another order of dimensions."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(32, 1)

    def forward(self, x):
        wide = self.up(x).expand(-1, -1, 32)
        return x * wide + x.transpose(0, 1).sigmoid().transpose(0, 1)


class SavesParts(torch.autograd.Function):
    """Saves two parts of one memory: the first begins where no float32 can."""

    @staticmethod
    def forward(ctx, x):
        memory = x.detach().clone()
        ctx.save_for_backward(memory.view(torch.bfloat16).flatten()[1:4], memory[:, 1:])
        return x * 2

    @staticmethod
    def backward(ctx, *gradients):
        (gradient,) = gradients
        half, rest = ctx.saved_tensors
        shifted = torch.nn.functional.pad(rest, (0, 0, 1, 0))
        return gradient * 2 + shifted + half.float().nan_to_num().clamp(-1, 1).sum()


class Parts(nn.Module):
    """Saved views of several types over one memory, of which the first bytes are not saved."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(32, 32)

    def forward(self, x):
        return x + SavesParts.apply(self.up(x)).sigmoid()


@pytest.mark.parametrize("make", [Transposes, Slices, Expands, Parts])
@pytest.mark.parametrize("store", ["memory", "file"])
def test_views_come_back_over_the_same_memory(make, store, tmp_path):
    model = make_stack(make)
    plan = Plan(layers=WHOLE.layers, store=f"file:{tmp_path}" if store == "file" else store)
    expected = [train_stack(model, num_batches=1), train_stack(model)]
    with apply(model, plan):
        for wanted, steps in zip(expected, (1, 2), strict=True):
            assert_same_step(train_stack(model, num_batches=steps), wanted)


def test_a_matrix_and_its_transpose_are_stored_once():
    with apply(model := make_stack(Transposes, num_layers=1), WHOLE) as run:
        train_stack(model, num_batches=1)
    matrix = 2 * 64 * 32 * 4
    square = 2 * 64 * 64 * 4  # y @ y.T
    assert run.times.sent_bytes == 2 * matrix + square  # and the input


def test_a_layer_is_run_once():
    calls = []

    class Counts(Transposes):
        def forward(self, x):
            calls.append(1)
            return super().forward(x)

    with apply(model := make_stack(Counts), WHOLE):
        train_stack(model, num_batches=1)
    assert len(calls) == 3


@pytest.mark.parametrize("store", ["memory", "file"])
def test_a_retained_graph_runs_backward_twice(store, tmp_path):
    plan = Plan(layers=WHOLE.layers, store=f"file:{tmp_path}" if store == "file" else store)
    model, x = make_stack(Transposes), torch.randn(2, 64, 32)
    for _ in range(2):
        model(x).sum().backward()
    expected = [one.grad.clone() for one in model.parameters()]
    model.zero_grad()
    with apply(model, plan):
        loss = model(x).sum()
        loss.backward(retain_graph=True)
        loss.backward()
    assert all(
        torch.equal(one.grad, wanted)
        for one, wanted in zip(model.parameters(), expected, strict=True)
    )


def test_complex_and_empty_tensors_are_left_to_autograd():
    class Fourier(nn.Module):
        def __init__(self):
            super().__init__()
            self.up = nn.Linear(32, 32)

        def forward(self, x):
            y = torch.fft.rfft(self.up(x))
            energy = (y * y.conj()).real.sum(-1, keepdim=True)
            return x * energy.rsqrt() + (x[:, :0] * x[:, :0]).sum()

    model = make_stack(Fourier)
    expected = train_stack(model)
    for plan in (WHOLE, Plan.fixed(alpha=0.5)):
        with apply(model, plan):
            assert_same_step(train_stack(model), expected)
