import copy
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.utils.checkpoint import checkpoint

import qsync
from qsync.planner.plan import RankPlan, describe_operators
from qsync.runtime.apply import find_plan
from qsync.runtime.modules import MatMul, get_precision, list_operators
from shared.errors import ConfigError


class Net(nn.Module):
    """All kinds of operators, nested, with a tied weight, a frozen one and one used twice."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(11, 6, padding_idx=0)
        self.conv = nn.Conv1d(6, 6, 3, padding="same")
        self.block = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6, bias=False))
        self.product = MatMul()
        self.head = nn.Linear(6, 11)
        self.head.weight = self.table.weight
        self.block[0].requires_grad_(False)

    def forward(self, ids):
        x = self.conv(self.table(ids).transpose(1, 2)).transpose(1, 2)
        x = self.block(self.block(x))
        return self.head(self.product(x, x.transpose(1, 2).softmax(-1) @ x))


def _build(precision=None, **overrides):
    torch.manual_seed(0)
    model = Net()
    if precision:
        qsync.apply(model, qsync.Plan.uniform(model, precision, overrides))
    return model


IDS = torch.tensor([[1, 2, 3, 4], [5, 0, 7, 10]])


def _step(model):
    model.zero_grad()
    out = model(IDS)
    out.square().sum().backward()
    return out.detach(), {name: each.grad for name, each in model.named_parameters()}


@pytest.mark.parametrize("precision", ["fp8", "int8", "bf16", "fp16"])
def test_a_lowered_model_keeps_its_parameters_and_computes_nearly_the_same(precision):
    model, low = _build(), _build(precision)
    expected, grads = _step(model)
    out, low_grads = _step(low)
    assert [(name, each.dtype) for name, each in low.named_parameters()] == [
        (name, torch.float32) for name, _ in model.named_parameters()
    ]
    assert list(low.state_dict()) == list(model.state_dict())
    assert low.head.weight is low.table.weight
    assert 0 < float((out - expected).norm() / expected.norm()) < 0.15
    for name, grad in grads.items():
        if grad is None:
            assert low_grads[name] is None
            continue
        assert low_grads[name].dtype == torch.float32
        assert 0 < float((low_grads[name] - grad).norm() / grad.norm()) < 0.3


def test_only_named_operators_are_lowered():
    low = _build("fp32", **{"block.2": "int8"})
    precisions = {name: get_precision(module) for name, module in list_operators(low).items()}
    assert precisions == dict.fromkeys(precisions, "fp32") | {"block.2": "int8"}
    x = torch.randn(3, 6)
    assert torch.equal(low.block[2](x), qsync.linear(x, low.block[2].weight, precision="int8"))


def test_another_plan_replaces_the_former_and_float32_restores():
    model = _build()
    expected, grads = _step(model)
    described, kinds = describe_operators(model), [type(each) for each in model.modules()]
    for precision in ("int8", "bf16", "fp32"):
        plan = qsync.Plan.uniform(model, precision)
        assert qsync.apply(model, plan) is model
        assert find_plan(copy.deepcopy(model)) == plan
        assert describe_operators(model) == described
    assert [type(each) for each in model.modules()] == kinds
    assert not any("precision" in vars(each) for each in model.modules())
    out, restored = _step(model)
    assert torch.equal(out, expected)
    assert all(grad is None or torch.equal(grad, grads[name]) for name, grad in restored.items())


def test_masters_are_saved_so_plans_change_between_runs(tmp_path):
    low = _build("int8")
    optimizer = torch.optim.SGD(low.parameters(), lr=0.01)
    _step(low)
    optimizer.step()
    torch.save(low.state_dict(), tmp_path / "masters.pt")
    other = _build("bf16")
    other.load_state_dict(torch.load(tmp_path / "masters.pt"))
    for name, parameter in low.named_parameters():
        assert torch.equal(parameter, other.get_parameter(name))


def test_hooks_clipping_and_recomputed_blocks_go_on():
    low = _build("int8")
    seen = []
    low.block[2].register_forward_hook(lambda *_: seen.append(1))
    qsync.apply(low, qsync.Plan.uniform(low, "bf16"))
    _, grads = _step(low)
    assert seen == [1, 1]
    block = low.block
    low.zero_grad()
    stand_in: Any = nn.Identity()
    stand_in.forward = lambda x: checkpoint(block, x, use_reentrant=False)
    kept, low.block = low.block, stand_in
    low(IDS).square().sum().backward()
    low.block = kept
    for name, parameter in low.named_parameters():
        assert parameter.grad is None or torch.equal(parameter.grad, grads[name])
    clip_grad_norm_(low.parameters(), 0.1)
    norms = [each.grad.norm() for each in low.parameters() if each.grad is not None]
    assert float(torch.stack(norms).norm()) == pytest.approx(0.1, rel=1e-4)


def test_unused_operators_and_subclasses_are_no_obstacle():
    class Own(nn.Linear):
        pass

    model = nn.ModuleDict({"used": nn.Linear(4, 4), "unused": nn.Linear(4, 4), "own": Own(4, 4)})
    assert list(list_operators(model)) == ["used", "unused"]
    qsync.apply(model, qsync.Plan.uniform(model, "int8"))
    model["own"](model["used"](torch.ones(2, 4))).sum().backward()
    assert model["unused"].weight.grad is None
    assert type(model["own"]) is Own


def test_tables_that_renormalise_or_have_sparse_gradients_are_left_out():
    tables = [nn.Embedding(4, 3), nn.Embedding(4, 3, max_norm=1.0), nn.Embedding(4, 3, sparse=True)]
    assert list(list_operators(nn.ModuleList(tables))) == ["0"]


def test_a_lowered_table_keeps_to_its_settings():
    table = nn.Embedding(4, 3, padding_idx=1, scale_grad_by_freq=True)
    gradients = []
    for precision in ("fp32", "int8"):
        qsync.apply(table, qsync.Plan.uniform(table, precision))
        table.zero_grad()
        out = table(torch.tensor([[1, 1, 2], [0, 0, 0]]))
        (out * torch.arange(18.0).view(2, 3, 3)).sum().backward()
        gradients.append(table.weight.grad.clone())
    assert torch.equal(*gradients)


def test_plans_that_do_not_fit_are_refused_and_change_nothing():
    model = _build()
    plan = qsync.Plan.uniform(nn.Sequential(nn.Linear(6, 6)), "int8")
    with pytest.raises(ConfigError, match="expected the model that it was made for"):
        qsync.apply(model, plan)
    half = _build().bfloat16()
    with pytest.raises(
        ConfigError, match=r"expected float32 weights.* got torch.bfloat16 in 'table'"
    ):
        qsync.apply(half, qsync.Plan.uniform(half, "int8"))
    for each in (model, half):
        assert {get_precision(module) for module in list_operators(each).values()} == {"fp32"}
        assert find_plan(each) is None
    ranks = (RankPlan(lowered={}), RankPlan(lowered={"head": "int8"}))
    with pytest.raises(ConfigError, match="join the ranks before `apply`"):
        qsync.apply(model, qsync.Plan(operators=describe_operators(model), ranks=ranks))
    with pytest.raises(ConfigError, match="operator: expected one of the plan's"):
        qsync.Plan.uniform(model, "int8", {"hed": "bf16"})
    with pytest.raises(ConfigError, match="precision: expected one of"):
        qsync.Plan(operators={"a": "Linear 1x1"}, ranks=(RankPlan(lowered={"a": "int3"}),))


@pytest.mark.parametrize("precision", ["fp8", "int8", "bf16"])
@pytest.mark.parametrize("layer", [nn.Linear(6, 5), nn.Conv1d(4, 5, 3), nn.Conv2d(4, 5, 3)])
def test_results_may_be_written_in_place_as_those_of_float32(precision, layer):
    x = torch.randn(2, 4, *([6, 6] if isinstance(layer, nn.Conv2d) else [6]))
    qsync.apply(layer, qsync.Plan.uniform(layer, precision))
    layer.zero_grad()
    layer(x).relu().sum().backward()
    expected = layer.weight.grad.clone()
    layer.zero_grad()
    out = layer(x)
    assert out.is_contiguous()
    out.relu_().sum().backward()
    assert torch.equal(layer.weight.grad, expected)


@pytest.mark.parametrize("mode", ["zeros", "circular", "reflect", "replicate"])
@pytest.mark.parametrize("padding", ["same", "valid", (1, 2)])
def test_a_convolution_pads_as_torch_does(mode, padding):
    x = torch.randn(2, 4, 7, 6, generator=torch.Generator().manual_seed(0))
    for kernel, dilation, groups in ((3, 1, 2), ((2, 3), (1, 2), 1), ((4, 2), 1, 4)):
        layer = nn.Conv2d(
            4, 4, kernel, padding=padding, dilation=dilation, groups=groups, padding_mode=mode
        )
        expected = [layer(x), layer(x[0])]
        for precision, limit in (("fp16", 2e-3), ("int8", 3e-2)):
            qsync.apply(layer, qsync.Plan.uniform(layer, precision))
            for each, out in zip((x, x[0]), expected, strict=True):
                torch.testing.assert_close(layer(each), out, rtol=0, atol=limit)


def test_a_convolution_that_is_dilated_later_reads_its_present_settings():
    layer = nn.Conv2d(3, 4, 3, padding=1)
    layer.dilation, layer.padding = (2, 2), (2, 2)
    x = torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(0))
    expected = layer(x)
    qsync.apply(layer, qsync.Plan.uniform(layer, "fp16"))
    torch.testing.assert_close(layer(x), expected, rtol=0, atol=2e-3)


COMPILED = """
import torch, qsync
from torch import nn
from qsync.runtime.apply import find_plan
for precision in ("int8", "bf16", "fp8"):
    torch.manual_seed(0)
    layers = nn.Embedding(9, 6), nn.Conv1d(4, 4, 3, padding=1), nn.Linear(6, 5), nn.GELU(), nn.Linear(5, 3)
    low = qsync.apply(nn.Sequential(*layers), qsync.Plan.uniform(nn.Sequential(*layers), precision))
    ids = torch.randint(9, (2, 4))
    gradients = []
    for model in (low, torch.compile(low, backend="aot_eager", fullgraph=True)):
        assert find_plan(model) is find_plan(low) is not None
        low.zero_grad()
        model(ids).square().sum().backward()
        gradients.append([each.grad.clone() for each in low.parameters()])
    for eager, compiled in zip(*gradients, strict=True):
        torch.testing.assert_close(compiled, eager, rtol=1e-4, atol=1e-5)
    print(precision)
"""


@pytest.mark.slow
def test_a_compiled_model_is_one_graph_and_has_the_gradients_of_the_eager_one():
    # Checks of annotations, which tests switch on, cannot be compiled.
    done = subprocess.run(
        [sys.executable, "-c", COMPILED], capture_output=True, text=True, timeout=200, check=False
    )
    assert done.stdout.split() == ["int8", "bf16", "fp8"], done.stderr[-2000:]


def test_a_synchronised_norm_stays_between_lowered_convolutions():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 3)).eval()
    converted = nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(model))
    for each in (model, converted):
        qsync.apply(each, qsync.Plan.uniform(each, "int8"))
    assert type(converted[1]) is nn.SyncBatchNorm
    x = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    assert torch.equal(model(x), converted(x))
