import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import qsync
from qsync.profiler import step_timing
from qsync.profiler.step_timing import END, time_precisions


class _Clock:
    """A clock that modules advance: seconds without waiting."""

    def __init__(self):
        self.now = 0.0

    def perf_counter(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = _Clock()
    monkeypatch.setattr(step_timing, "time", clock)
    return clock


class _Work(torch.autograd.Function):
    """Takes 2^k seconds forward and 100 * 2^k backward."""

    @staticmethod
    def forward(ctx, x, clock, k):
        clock.now += 2.0**k
        ctx.settings = clock, k
        return x.clone()

    @staticmethod
    def backward(ctx, *grads):
        clock, k = ctx.settings
        clock.now += 100 * 2.0**k
        return grads[0], None, None


class _TimedLinear(nn.Sequential):
    """Work before a linear layer; the layer's own hooks take it for a gap."""

    def __init__(self, clock, k):
        super().__init__(nn.Linear(3, 3))
        self.clock, self.k = clock, k

    def forward(self, input):
        return super().forward(_Work.apply(input, self.clock, self.k))


def _sum(model, batch):
    return model(batch).sum()


def test_gaps_are_told_apart_forward_and_backward(clock):
    model = nn.Sequential(*(_TimedLinear(clock, k) for k in range(3)))

    def loss_fn(model, batch):
        return _Work.apply(model(batch), clock, 3).sum()

    steps = time_precisions(model, [torch.randn(2, 3, requires_grad=True)], loss_fn, ["fp32"])
    seconds = steps["fp32"]
    names = ["0.0", "1.0", "2.0", END]
    assert {n: seconds.forward_gap_s.get(n, 0.0) for n in names} == dict(
        zip(names, [1.0, 2.0, 4.0, 8.0], strict=True)
    )
    assert {n: seconds.backward_gap_s.get(n, 0.0) for n in names} == dict(
        zip(names, [100.0, 200.0, 400.0, 800.0], strict=True)
    )
    assert not any(seconds.forward_s.values())
    assert not any(seconds.backward_s.values())
    assert seconds.total_s == 1515.0


def test_parts_add_up_to_a_step_without_hooks(clock, monkeypatch):
    model = nn.Sequential(*(_TimedLinear(clock, k) for k in range(3)))

    def tick():
        clock.now += 0.5
        return clock.now

    monkeypatch.setattr(clock, "perf_counter", tick)
    x = torch.randn(2, 3, requires_grad=True)
    seconds = time_precisions(model, [x], _sum, ["fp32"])["fp32"]
    # Looking at the clock thrice takes two ticks between the first and the last time.
    assert seconds.total_s == pytest.approx(707 + 2 * 0.5)
    assert all(each > 0 for each in seconds.forward_s.values())


def test_recomputed_operators_count_as_backward_work(clock):
    block = _TimedLinear(clock, 0)

    class Recomputed(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = block

        def forward(self, x):
            return checkpoint(self.block, x, use_reentrant=False)

    model = Recomputed()
    x = torch.randn(2, 3, requires_grad=True)
    seconds = time_precisions(model, [x], _sum, ["fp32"])["fp32"]
    assert sum(seconds.forward_s.values()) + sum(seconds.forward_gap_s.values()) == 1.0
    # Once more forward, then backward.
    assert sum(seconds.backward_s.values()) + sum(seconds.backward_gap_s.values()) == 101.0


def test_operators_are_measured_in_each_precision_on_a_real_clock():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 512), nn.Tanh(), nn.Linear(512, 8))
    batches = [torch.randn(256, 64) for _ in range(2)]
    steps = time_precisions(model, batches, _sum, ["int8", "fp32"])
    for seconds in steps.values():
        assert set(seconds.forward_s) == set(seconds.backward_s) == {"0", "2"}
        assert all(each > 0 for part in seconds.parts[:2] for each in part.values())
        own_s = sum(seconds.forward_s.values()) + sum(seconds.backward_s.values())
        assert own_s < seconds.total_s
    assert steps["fp32"].backward_s["0"] > 0


def test_the_model_keeps_its_plan_weights_and_gradients():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    qsync.apply(model, qsync.Plan.uniform(model, "fp32", {"1": "int8"}))
    _sum(model, torch.ones(1, 4)).backward()
    before = [(p.clone(), p.grad.clone(), p.grad) for p in model.parameters()]
    time_precisions(model, [torch.randn(3, 4)], _sum, ["bf16", "fp32"])
    assert model[1].precision == "int8"
    for parameter, (value, gradient, own) in zip(model.parameters(), before, strict=True):
        assert torch.equal(parameter, value)
        assert parameter.grad is own
        assert torch.equal(parameter.grad, gradient)
    assert not model[0]._forward_hooks
    assert not model[0]._forward_pre_hooks


def test_no_hook_stays_on_nodes_that_outlive_a_step(monkeypatch):
    """DDP keeps the nodes at which gradients are accumulated, so that replanning watches the same ones."""
    model = nn.Linear(3, 2)
    nodes = [parameter.view_as(parameter).grad_fn for parameter in model.parameters()]
    time_precisions(model, [torch.randn(2, 3)], _sum, ["fp32"])
    # Whoever still looks at the clock fails.
    monkeypatch.setattr(step_timing, "time", None)
    _sum(model, torch.randn(2, 3)).backward()
    assert len(nodes) == 2


def test_precisions_that_are_hopeless_are_measured_twice(clock, monkeypatch):
    model = nn.Sequential(nn.Linear(3, 3))
    num_calls = {"bf16": 0, "fp32": 0}

    def loss_fn(model, batch):
        precision = getattr(model[0], "precision", "fp32")
        num_calls[precision] += 1
        clock.now += {"bf16": 50.0, "fp32": 1.0}[precision]
        return _sum(model, batch)

    steps = time_precisions(model, [torch.randn(2, 3)], loss_fn, ["bf16", "fp32"])
    assert num_calls["bf16"] == 4 < num_calls["fp32"]
    assert steps["bf16"].total_s == 50.0
    assert steps["fp32"].total_s == 1.0
