"""What else may be at work on a model: refused, or left alone."""

import copy
import io
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from memo import Plan, apply
from memo.planner.layer_plan import LayerPlan
from shared.errors import ConfigError, DataError

from ..runtime.models import (
    Block,
    Stack,
    assert_same_gradients,
    assert_same_step,
    gradients,
    make_input,
    make_model,
    make_stack,
    train_stack,
)
from .steps import HALF, WHOLE, loss_of

pytestmark = pytest.mark.unchecked  # models are trained


@pytest.mark.parametrize(
    ("model", "plan", "text"),
    [
        (
            make_stack(),
            "plan.json",
            "plan: expected a memo.Plan, got 'plan.json'; give one from memo.autotune, Plan.fixed or Plan.load",
        ),
        ("gpt2", HALF, "model: expected a torch.nn.Module, got 'gpt2'; build the model, and give it first"),
        (
            make_stack().to("meta"),
            HALF,
            "model: expected parameters in RAM or on a CUDA GPU, got device meta; load them there first",
        ),
    ],
)  # fmt: skip
def test_what_is_no_model_or_plan_is_refused(model, plan, text):
    with pytest.raises(ConfigError) as caught:
        apply(model, plan)
    assert str(caught.value) == text


def test_two_plans_on_one_model_are_refused():
    model = make_model("llama")
    for plan in (HALF, WHOLE, Plan(layers=(LayerPlan(),))):
        with (
            apply(model, plan),
            pytest.raises(ConfigError, match="close the run"),
        ):
            apply(model, HALF)
    with apply(model, HALF):
        pass


def test_gradient_checkpointing_is_refused():
    model = make_model("llama")
    model.gradient_checkpointing_enable()
    with pytest.raises(ConfigError, match="gradient_checkpointing_disable"):
        apply(model, HALF)


class Checkpointed(Block):
    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


def test_a_checkpoint_inside_a_layer_is_refused():
    model = make_stack(Checkpointed)
    expected = train_stack(model)
    with apply(model, HALF), pytest.raises(ConfigError, match=r"torch\.utils\.checkpoint"):
        train_stack(model)
    with apply(model, Plan(layers=(LayerPlan(),))):
        assert_same_step(train_stack(model), expected)


def test_compiled_models_are_refused():
    model = make_stack()
    with pytest.raises(ConfigError, match=r"under torch\.compile"):
        apply(torch.compile(model, backend="eager"), HALF)
    with apply(model, HALF), pytest.raises(ConfigError, match=r"under torch\.compile"):
        torch.compile(model, backend="eager")(make_input())
    torch._dynamo.reset()
    expected = train_stack(make_stack())
    with apply(model, HALF):
        assert_same_step(train_stack(model), expected)


def test_capture_of_a_cuda_graph_is_refused(monkeypatch):
    model = make_stack()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with apply(model, HALF), pytest.raises(ConfigError, match="capture of a CUDA graph"):
        model(make_input())


def test_a_backward_after_the_plan_was_taken_off_is_refused():
    model = make_model("llama")
    with apply(model, HALF):
        loss = loss_of(model)
    with pytest.raises(RuntimeError, match="close the run, or leave its `with` block, when"):
        loss.backward()


def test_a_plan_for_another_number_of_layers_is_refused():
    plan = Plan(layers=HALF.layers * 4)
    with pytest.raises(ConfigError, match=r"plans of the model's 3 layers, got 4"):
        apply(make_model("llama"), plan)


def test_layers_that_are_not_the_models_are_refused():
    with pytest.raises(ConfigError, match="got 1 of which 1 are not"):
        apply(make_stack(), HALF, layers=[Block()])
    with pytest.raises(ConfigError, match="expected a list of layers"):
        apply(nn.Linear(3, 3), HALF)


def test_pinned_memory_without_a_gpu_is_refused():
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(ConfigError, match="expected a GPU for 'pinned'"):
        apply(make_model("llama"), Plan.fixed(alpha=0.5, store="pinned"))


def test_pinned_memory_that_the_system_refuses_names_the_limit(monkeypatch):
    """As `cudaHostRegister` fails where the limit of locked memory is low: a GPU is only pretended."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    refusing = SimpleNamespace(cudaHostRegister=lambda *_: 2)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: refusing)
    model = make_model("llama")
    with (
        apply(model, Plan.fixed(alpha=0.5, store="pinned")),
        pytest.raises(DataError, match=r"more of pinned memory, got CUDA error 2; .*`ulimit -l`"),
    ):
        loss_of(model)


class Keyword(Block):
    def forward(self, x):
        return super().forward(x.float())


def test_a_layer_without_a_floating_point_input_is_refused():
    model = Stack([Keyword()])
    with apply(model, HALF), pytest.raises(ConfigError, match="given a floating-point tensor"):
        model.layers[0](torch.ones(2, 32, dtype=torch.int64))


def test_copies_of_a_model_run_on_their_own():
    model = make_stack()
    with apply(model, HALF) as run:
        other = copy.deepcopy(model)
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        read = torch.load(file, weights_only=False)
        for one in (other, read):
            for parameter in one.parameters():
                parameter.data.mul_(2)
            train_stack(one)
        assert run.num_restored == 0
        found = train_stack(model)
    assert_same_step(found, train_stack(model))
    doubled = make_stack()
    for parameter in doubled.parameters():
        parameter.data.mul_(2)
    assert_same_gradients(gradients(other), train_stack(doubled)[1])
    assert_same_gradients(gradients(read), gradients(other))
