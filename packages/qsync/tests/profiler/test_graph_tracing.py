import pytest
import torch
from torch import nn
from torch.nn import functional

import qsync
from qsync.data import ResNet8, classify
from qsync.profiler.graph_tracing import gap_name, trace_model
from qsync.runtime.modules import MatMul
from shared.errors import DataError


def _mean(model, batch):
    return model(batch).mean()


class _Branches(nn.Module):
    """Two branches of one input, joined by an addition, then a product of a tensor by itself."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(6, 8)
        self.left, self.right = nn.Linear(8, 8), nn.Linear(8, 8)
        self.gram = MatMul()

    def forward(self, x, scale=2.0, mask=None):
        x = functional.relu(self.stem(x)) * scale
        if mask is not None:
            x = x * mask
        both = self.left(x).softmax(-1) + self.right(x)
        return self.gram(both, both.reshape(both.shape).transpose(0, 1))


def _ops(traced):
    """Operators by name, without those that stand for time."""
    return {
        op.name: op
        for op in traced.graph.ops
        if not op.name.startswith("before ") and op.name != "loss"
    }


def test_fx_finds_who_reads_whom():
    traced = trace_model(_Branches(), torch.randn(5, 6), _mean)
    assert traced.reason == ""
    assert traced.names == ("stem", "left", "right", "gram")
    ops = _ops(traced)
    relu, product = "relu (function)", "mul (function)"
    assert ops["stem"].inputs == ()
    assert ops[relu].inputs == ("stem",)
    # Results leave in float32: nothing follows its inputs.
    assert ops[relu].kind == "fixed"
    assert ops[product].kind == "fixed"
    assert ops["left"].inputs == ops["right"].inputs == (product,)
    assert ops["left"].weight_numel == 64
    assert ops["left"].numel == 40
    assert ops["softmax (method)"].kind == "fixed"
    assert ops["gram"].inputs == ("add (function)", "transpose (method)")
    assert (ops["gram"].kind, ops["gram"].weight_numel, ops["gram"].numel) == ("linear", 0, 25)


def test_casts_follow_from_the_traced_graph():
    traced = trace_model(_Branches(), torch.randn(5, 6), _mean)
    mapper = qsync.CostMapper(
        traced.graph, kernel_s=lambda op, p: 0.0, cast_s=lambda source, target, numel: 1.0
    )
    mapper.set("stem", "bf16")
    mapper.set("gram", "int8")
    assert mapper.casts() == {
        ("weight", "stem", "stem"),
        ("forward", "stem", "relu (function)"),
        ("backward", "relu (function)", "stem"),
        ("forward", "add (function)", "gram"),
        ("forward", "transpose (method)", "gram"),
        ("backward", "gram", "add (function)"),
        ("backward", "gram", "transpose (method)"),
    }


def test_gaps_stand_before_each_operator_and_at_the_end():
    traced = trace_model(ResNet8(4), (torch.randn(2, 1, 8, 8), torch.zeros(2).long()), classify)
    names = [op.name for op in traced.graph.ops]
    for name in traced.names:
        assert names[names.index(name) - 1] == gap_name(name) == f"before {name}"
    assert names[-1] == gap_name("")
    assert len(traced.names) == 10
    gap = traced.graph.ops[names.index("before stem")]
    assert (gap.kind, gap.inputs, gap.numel) == ("fixed", (), 0)


class _Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = _Branches()

    def forward(self, x):
        return self.inner(x) if x.sum() > -1e9 else x


class _Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(9, 6)
        self.layer = nn.Linear(6, 6)

    def forward(self, ids):
        return self.layer(self.layer(self.table(ids)).tanh())


@pytest.mark.parametrize(
    ("model", "batch", "loss_fn", "reason"),
    [
        (_Branching(), torch.randn(5, 6), _mean, "TraceError"),
        (_Twice(), torch.randint(0, 9, (3,)), _mean, "one of them twice"),
        (_Branches(), torch.randn(5, 6), lambda m, x: (m(x) - m(-x)).mean(), "2 times"),
        (_Branches(), torch.randn(5, 6), lambda m, x: m.left(m.stem(x)).mean(), "0 times"),
    ],
)
def test_modules_are_chained_where_fx_fails(model, batch, loss_fn, reason):
    traced = trace_model(model, batch, loss_fn)
    assert reason in traced.reason
    ops = _ops(traced)
    assert [op.name for op in ops.values() if op.kind == "linear"] == list(traced.names)
    for before, after in zip(traced.names, traced.names[1:], strict=False):
        assert ops[after].inputs == (f"output of {before}",)
        assert ops[f"output of {before}"].inputs == (before,)
        assert ops[f"output of {before}"].kind == "fixed"


def test_a_lookup_casts_no_table():
    assert _ops(trace_model(_Twice(), torch.zeros(3).long(), _mean))["table"].weight_numel == 0


def test_tracing_keeps_buffers_and_random_numbers():
    norm = nn.BatchNorm2d(2)
    model = nn.Sequential(nn.Conv2d(1, 2, 3), norm, nn.Dropout(0.5))
    before, state = [each.clone() for each in norm.buffers()], torch.get_rng_state()
    trace_model(model, torch.randn(2, 1, 5, 5, generator=torch.Generator()), _mean)
    assert all(map(torch.equal, norm.buffers(), before))
    assert torch.equal(torch.get_rng_state(), state)


def test_a_loss_without_the_model_is_refused():
    with pytest.raises(DataError, match="expected a call of the model's operators, got none"):
        trace_model(_Branches(), torch.randn(5, 6), lambda model, batch: batch.mean())
