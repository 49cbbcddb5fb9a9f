import random

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import qsync
from qsync.data import ResNet8, classify, next_token_loss
from qsync.planner.memory import count_saved_bytes
from qsync.profiler.saved_tensors import measure_saved_bytes, record_saved_tensors
from qsync.runtime.modules import MatMul


class _Mixed(nn.Module):
    """Tables, shared inputs, products, a frozen layer, an unbatched dropout and a checkpoint."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(20, 16)
        self.query, self.key = nn.Linear(16, 16), nn.Linear(16, 16)
        self.scores = MatMul()
        self.norm, self.dropout = nn.LayerNorm(16), nn.Dropout(0.2)
        self.block = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))
        self.head = nn.Linear(16, 4)

    def forward(self, ids):
        x = self.norm(self.table(ids))
        scores = self.scores(self.query(x), self.key(x).transpose(1, 2)).softmax(-1)
        x = self.dropout(scores @ x)
        x = x + checkpoint(self.block, x, use_reentrant=False)
        return self.head(x.mean(1))


class _Padded(nn.Module):
    """Convolutions that pad by themselves, before they multiply, and a layout that is copied."""

    def __init__(self):
        super().__init__()
        self.even = nn.Conv1d(3, 4, 4, padding="same")
        self.odd = nn.Conv1d(4, 4, 3, padding="same")
        self.ring = nn.Conv1d(4, 5, 3, padding=2, padding_mode="circular")
        self.query, self.key = nn.Linear(5, 8), nn.Linear(5, 8)
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        x = self.ring(self.odd(self.even(x).sigmoid())).transpose(1, 2)
        return self.head((self.query(x) * self.key(x)).mean(1))


def _llama():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        vocab_size=50,
        num_attention_heads=4,
        use_cache=False,
    )
    return transformers.LlamaForCausalLM(config), torch.randint(0, 50, (2, 12)), next_token_loss


def _build(kind):
    if kind == "mixed":
        return _Mixed(), (torch.randint(0, 20, (3, 10)), torch.randint(0, 4, (3,))), classify
    if kind == "convolutions":
        return ResNet8(8), (torch.randn(6, 1, 8, 8), torch.randint(0, 10, (6,))), classify
    if kind == "padded":
        return _Padded(), (torch.randn(3, 3, 9), torch.randint(0, 4, (3,))), classify
    return _llama()


@pytest.mark.parametrize("kind", ["mixed", "convolutions", "padded", "llama"])
def test_saved_bytes_of_any_plan_are_predicted_from_a_float32_step(kind):
    model, batch, loss_fn = _build(kind)
    names = list(qsync.Plan.uniform(model, "fp32").operators)
    saved = record_saved_tensors(model, batch, loss_fn)
    draws = random.Random(0)
    choices = [dict.fromkeys(names, p) for p in ("fp32", "bf16", "fp16", "int8", "fp8")]
    choices += [{n: draws.choice(["fp32", "bf16", "int8"]) for n in names} for _ in range(5)]
    sizes = set()
    for precisions in choices:
        qsync.apply(model, qsync.Plan.uniform(model, "fp32", precisions))
        measured = measure_saved_bytes(model, batch, loss_fn)
        predicted = count_saved_bytes(saved, lambda name, p=precisions: p.get(name, "fp32"))
        assert predicted == pytest.approx(measured, rel=0.005)
        sizes.add(measured)
    assert len(sizes) > 5


def test_codes_have_a_scale_for_each_sample_and_output_channel():
    x = torch.randn(7, 3, 4, 4)
    saved = [
        record_saved_tensors(nn.Conv2d(3, 5, 2), each, lambda m, x: m(x).sum())
        for each in (x.clone().requires_grad_(), x)
    ]
    scales = [{each.role: each.num_scales for each in kept} for kept in saved]
    # A gradient of the data is not asked for, so that its weight is not kept.
    assert scales == [{"weight": 5, "operand": 7}, {"operand": 7}]


def test_frozen_weights_keep_no_input():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8).requires_grad_(False))
    saved = record_saved_tensors(model, torch.randn(5, 8), lambda m, x: m(x).sum())
    assert [(each.op, each.role, each.numel) for each in saved] == [
        ("0", "operand", 40),
        ("1", "weight", 64),
    ]


class _Partly(nn.Module):
    """A frozen convolution, products of which one factor has no gradient, and layers that run twice."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv1d(3, 6, 3)
        self.frozen = nn.Conv1d(6, 6, 3, padding="same").requires_grad_(False)
        self.mix, self.gram, self.layer = MatMul(), MatMul(), nn.Linear(6, 6)

    def forward(self, x):
        y = self.frozen(self.first(x).sigmoid()).transpose(1, 2)
        y = self.mix(y, torch.ones(6, 6))
        y = self.layer(self.layer(y.contiguous()).tanh())
        return self.gram(y[0], y[0].t()).mean()


@pytest.mark.parametrize("precision", ["fp32", "bf16", "int8"])
def test_frozen_and_repeated_operators_keep_what_they_need(precision):
    torch.manual_seed(0)
    model, x = _Partly(), torch.randn(1, 3, 12)
    saved = record_saved_tensors(model, x, lambda model, x: model(x))
    predicted = count_saved_bytes(saved, lambda name: precision if hasattr(model, name) else "fp32")
    qsync.apply(model, qsync.Plan.uniform(model, precision))
    assert predicted == measure_saved_bytes(model, x, lambda model, x: model(x))


def test_a_model_with_a_plan_is_recorded_in_float32():
    model, batch, loss_fn = _build("mixed")
    plain = record_saved_tensors(model, batch, loss_fn)
    qsync.apply(model, qsync.Plan.uniform(model, "int8"))
    again = record_saved_tensors(model, batch, loss_fn)
    assert [(s.op, s.role, s.numel) for s in again] == [(s.op, s.role, s.numel) for s in plain]
    assert model.head.precision == "int8"
