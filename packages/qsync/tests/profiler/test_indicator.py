import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

import qsync
from qsync.profiler.gradients import find_gradient, measure_noise
from qsync.profiler.state import preserve_state
from qsync.runtime.modules import MatMul
from shared.errors import ConfigError, DataError


def cross_entropy(model, batch):
    return functional.cross_entropy(model(batch[0]), batch[1])


def _classes(rows, num_classes=4):
    return torch.randint(0, num_classes, (rows,))


class _Attention(nn.Module):
    def __init__(self, dim=16):
        super().__init__()
        self.table = nn.Embedding(30, dim)
        self.query, self.key = nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.scores, self.mix = MatMul(), MatMul()
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, 4)

    def forward(self, ids):
        x = self.norm(self.table(ids))
        weights = self.scores(self.query(x), self.key(x).transpose(1, 2)).softmax(-1)
        return self.head(self.mix(weights, x).mean(1))


def _build(kind):
    torch.manual_seed(1)
    if kind == "dense":
        model = nn.Sequential(
            *(nn.Linear(48, 64), nn.Tanh(), nn.Linear(64, 32), nn.GELU(), nn.Linear(32, 4))
        )
        return model, [(torch.randn(96, 48), _classes(96)) for _ in range(2)]
    if kind == "convolutions":
        model = nn.Sequential(
            *(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.SiLU(), nn.Conv2d(8, 8, 3)),
            *(nn.SiLU(), nn.Flatten(), nn.Linear(8 * 6 * 6, 4)),
        )
        return model, [(torch.randn(24, 3, 8, 8), _classes(24))]
    return _Attention(), [(torch.randint(0, 30, (20, 12)), _classes(20))]


@pytest.mark.parametrize("kind", ["dense", "convolutions", "attention"])
@pytest.mark.parametrize("precision", ["int8", "bf16", "fp16", "fp8"])
def test_probe_predicts_the_error_of_lowering_each_operator(kind, precision):
    model, batches = _build(kind)
    probed = qsync.sensitivity(
        model, batches, cross_entropy, precisions=(precision,), num_probes=24
    )
    assert probed.method == "probe"
    assert list(probed.noise) == list(qsync.Plan.uniform(model, "fp32").operators)
    measured = {
        name: measure_noise(model, batches, cross_entropy, {name: precision})
        for name in probed.noise
    }
    for name, noise in measured.items():
        assert noise > 0
        # One rounding to nearest is one draw: small operators scatter.
        assert 0.4 < probed.noise[name][precision] / noise < 2.5, name
    total = sum(row[precision] for row in probed.noise.values())
    assert 1 / 1.5 < total / sum(measured.values()) < 1.5
    # Errors of single operators add up to that of all of them together.
    together = measure_noise(model, batches, cross_entropy, dict.fromkeys(probed.noise, precision))
    assert 0.5 < total / together < 2


def test_noise_of_one_product_is_its_closed_form():
    # loss = sum(y) of y = v w^T: the gradient is the sum of v's rows, whatever w is rounded to.
    model = nn.Linear(64, 8, bias=False)
    v = torch.randn(32, 64)
    scale = v.abs().amax(1, keepdim=True) / 127
    error = ((v / scale).round() * scale - v).square().sum()
    expected = float(error / v.sum(0).square().sum())
    probed = qsync.sensitivity(
        model, [v], lambda m, x: m(x).sum(), precisions=("int8",), num_probes=400
    )
    # bf16 rounds the scales that multiply the gradient, and the sum over rows, on top.
    assert expected < probed.noise[""]["int8"] < 1.4 * expected


def test_a_seed_gives_the_same_noise_and_float32_none():
    model, batches = _build("dense")
    first, again = (
        qsync.sensitivity(model, batches, cross_entropy, seed=3).noise for _ in range(2)
    )
    assert first == again
    other = qsync.sensitivity(model, batches, cross_entropy, seed=4).noise
    assert first["0"]["int8"] != other["0"]["int8"]
    assert {row["fp32"] for row in first.values()} == {0.0}
    assert list(first["0"]) == ["int8", "bf16", "fp32"]


class _OnceDifferentiable(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):  # type: ignore[override]
        return grads[0] * ctx.saved_tensors[0].cos()


class _Sine(nn.Module):
    def forward(self, x):
        return _OnceDifferentiable.apply(x)


def test_without_double_backward_operators_are_measured_one_at_a_time():
    model = nn.Sequential(nn.Linear(8, 8), _Sine(), nn.Linear(8, 4))
    batches = [(torch.randn(12, 8), _classes(12))]
    measured = qsync.sensitivity(model, batches, cross_entropy, precisions=("int8", "fp32"))
    assert measured.method == "one operator at a time"
    assert "once_differentiable" in measured.reason
    assert measured.noise == {
        name: {
            "int8": measure_noise(model, batches, cross_entropy, {name: "int8"}),
            "fp32": 0.0,
        }
        for name in ("0", "2")
    }


class _Trunk(nn.Module):
    """A table that is read without gradients, whose rounding no derivative sees."""

    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(9, 8), nn.Linear(8, 4)
        self.table.requires_grad_(False)

    def forward(self, ids):
        with torch.no_grad():
            x = self.table(ids)
        return self.head(x)


def test_an_operator_without_gradients_is_measured():
    model, batches = _Trunk(), [(torch.randint(0, 9, (12,)), _classes(12))]
    measured = qsync.sensitivity(model, batches, cross_entropy, precisions=("int8",))
    assert "'table' runs under torch.no_grad" in measured.reason
    expected = measure_noise(model, batches, cross_entropy, {"table": "int8"})
    assert measured.noise["table"]["int8"] == expected > 0


def test_derivatives_that_jump_are_noticed():
    model = nn.Sequential(
        nn.Linear(48, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4)
    )
    batches = [(torch.randn(96, 48), _classes(96))]
    measured = qsync.sensitivity(model, batches, cross_entropy, precisions=("bf16",))
    assert measured.method == "one operator at a time"
    assert "5 operators" not in measured.reason
    assert "3 operators in bf16 have noise" in measured.reason
    expected = measure_noise(model, batches, cross_entropy, {"0": "bf16"})
    assert measured.noise["0"]["bf16"] == expected


def _snapshot(model):
    return {
        "state": {name: value.clone() for name, value in model.state_dict().items()},
        "gradients": [p.grad if p.grad is None else p.grad.clone() for p in model.parameters()],
        "modes": [module.training for module in model.modules()],
        "random": (torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()),
        "types": [type(module) for module in model.modules()],
    }


def _is_same(a, b):
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_is_same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(_is_same(x, y) for x, y in zip(a, b, strict=True))
    return a == b


# Checks of signatures draw random numbers.
@pytest.mark.unchecked
@pytest.mark.parametrize("has_gradients", [False, True])
def test_the_model_is_left_as_it_was(has_gradients):
    model = nn.Sequential(
        *(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 4).eval())
    )
    batches = [(torch.randn(10, 6), _classes(10)) for _ in range(2)]

    def noisy_loss(model, batch):
        random.random()
        np.random.rand()
        return cross_entropy(model, batch)

    if has_gradients:
        cross_entropy(model, batches[0]).backward()
    qsync.apply(model, qsync.Plan.uniform(model, "fp32", {"0": "bf16"}))
    before = _snapshot(model)
    qsync.sensitivity(model, batches, noisy_loss)
    measure_noise(model, batches, noisy_loss, {"3": "int8"})
    for key, value in _snapshot(model).items():
        assert _is_same(before[key], value), key


def test_gradients_that_a_loss_adds_up_are_taken_back():
    model = nn.Linear(3, 2)
    model(torch.ones(1, 3)).sum().backward()
    own, before = model.weight.grad, model.weight.grad.clone()
    with preserve_state(model):
        model(torch.ones(1, 3)).sum().backward()
        assert not torch.equal(own, before)
    assert model.weight.grad is own
    assert torch.equal(own, before)


def test_a_model_with_a_plan_counts_as_float32():
    model, batches = _build("dense")
    before = qsync.sensitivity(model, batches, cross_entropy).noise
    qsync.apply(model, qsync.Plan.uniform(model, "int8"))
    assert qsync.sensitivity(model, batches, cross_entropy).noise == before


def test_frozen_operators_disturb_others_and_unused_ones_nobody():
    model = nn.ModuleDict({"a": nn.Linear(6, 8), "b": nn.Linear(8, 4), "c": nn.Linear(6, 4)})
    model["a"].requires_grad_(False)
    batches = [(torch.randn(20, 6), _classes(20))]

    def loss_fn(model, batch):
        return functional.cross_entropy(model["b"](model["a"](batch[0]).tanh()), batch[1])

    noise = qsync.sensitivity(model, batches, loss_fn, precisions=("int8",), num_probes=24).noise
    for name in ("a", "b"):
        measured = measure_noise(model, batches, loss_fn, {name: "int8"})
        assert 0.4 < noise[name]["int8"] / measured < 2.5
    assert noise["c"]["int8"] == 0.0


def test_gradients_of_unused_parameters_are_zero():
    model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    gradients = find_gradient(model, torch.ones(1, 2), lambda m, x: m[0](x).sum())
    assert [bool(each.any()) for each in gradients] == [True, True, False, False]


def test_bad_input_is_named():
    model, batches = _build("dense")
    with pytest.raises(DataError, match="batches: expected at least one, got none"):
        qsync.sensitivity(model, [], cross_entropy)
    with pytest.raises(ConfigError, match="ReLU without any; there is nothing to lower"):
        qsync.sensitivity(nn.ReLU(), batches, cross_entropy)
    with pytest.raises(ConfigError, match=r"precision: expected one of .*, got 'int4'"):
        qsync.sensitivity(model, batches, cross_entropy, precisions=("int4",))
    with pytest.raises(ConfigError, match="num_probes: expected at least 1, got 0"):
        qsync.sensitivity(model, batches, cross_entropy, num_probes=0)
    with pytest.raises(
        ConfigError, match=r"expected a scalar tensor with a gradient, got \[96, 4\]"
    ):
        qsync.sensitivity(model, batches, lambda m, batch: m(batch[0]))
    with pytest.raises(ConfigError, match="expected a parameter that requires a gradient"):
        qsync.sensitivity(model.requires_grad_(False), batches, cross_entropy)


def test_gradients_that_are_no_reference_are_refused():
    model, batches = _build("dense")
    with pytest.raises(DataError, match=r"not zero, got a squared norm of 0\.0"):
        qsync.sensitivity(model, batches, lambda m, batch: 0 * cross_entropy(m, batch))
    bad = batches[0][0].clone()
    bad[3, 2] = float("nan")
    with pytest.raises(DataError, match="got NaN or infinity as factor of '0'"):
        qsync.sensitivity(model, [(bad, batches[0][1])], cross_entropy)
