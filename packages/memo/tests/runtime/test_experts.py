"""Mixtures of experts: the decoder's layers are the model's layers, and what cannot run again is not run again."""

import pytest
import torch
from torch import nn

from memo import Budget, Plan, apply, autotune
from memo.planner.layer_plan import LayerPlan
from memo.runtime.layers import find_layers
from shared.errors import ConfigError

from .models import (
    Block,
    Stack,
    assert_same_step,
    make_batch,
    make_model,
    make_stack,
    train,
    train_stack,
)

pytestmark = pytest.mark.unchecked  # models are trained

HALF = Plan.fixed(alpha=0.5)


class Experts(nn.Module):
    """Rows go to the better of their two best experts of eight, which are a list of modules."""

    def __init__(self, num_experts=8):
        super().__init__()
        self.norm, self.router = nn.LayerNorm(32), nn.Linear(32, num_experts)
        self.experts = nn.ModuleList(Block() for _ in range(num_experts))

    def choose(self, scores):
        return scores.argmax(-1)

    def forward(self, x):
        rows = self.norm(x).flatten(0, 1)
        scores = self.router(rows).softmax(-1)
        chosen = self.choose(scores)
        out = torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            (mine,) = torch.where(chosen == number)
            out = out.index_add(0, mine, expert(rows[mine]) * scores[mine, number, None])
        return x + out.view_as(x)


class Balanced(Experts):
    """Experts' loads of past batches decide too: another forward chooses otherwise."""

    def __init__(self):
        super().__init__()
        self.register_buffer("load", torch.zeros(8))

    def choose(self, scores):
        chosen = (scores - 0.01 * self.load).argmax(-1)
        with torch.no_grad():
            self.load += torch.bincount(chosen, minlength=8)
        return chosen


def test_layers_of_a_mixture_are_the_decoders():
    model = make_model("mixtral", num_layers=2)
    assert find_layers(model) == list(model.model.layers)
    own = make_stack(Experts, num_layers=2)
    assert find_layers(own) == list(own.layers), "not the longer list of experts"


def test_of_lists_of_one_length_the_larger_is_the_decoders():
    model = Stack([Block(), Block()])
    model.heads = torch.nn.ModuleList([torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)])
    own = torch.nn.Module()
    own.heads, own.layers = model.heads, model.layers
    assert find_layers(own) == list(model.layers)


def test_layers_of_two_classes_are_asked_for():
    model = Stack([Experts(), Block(), Experts()])
    with pytest.raises(ConfigError, match=r"got one of Block, Experts; name the layers by"):
        find_layers(model)
    assert find_layers(model, [model.layers[0], model.layers[2]]) == [
        model.layers[0],
        model.layers[2],
    ]


@pytest.mark.parametrize("plan", [HALF, Plan(layers=(LayerPlan(mode="whole"),))])
def test_experts_in_a_list_train_alike(plan):
    model = make_stack(Experts, num_layers=2)
    expected = train_stack(model)
    with apply(model, plan):
        assert_same_step(train_stack(model), expected)


def test_experts_that_past_batches_change_are_refused_and_whole_keeps_them():
    expected = train_stack(make_stack(Balanced, num_layers=2))
    with (
        apply(model := make_stack(Balanced, num_layers=2), HALF),
        pytest.raises(ConfigError, match=r"writes to load in place"),
    ):
        train_stack(model)
    with apply(
        model := make_stack(Balanced, num_layers=2), Plan(layers=(LayerPlan(mode="whole"),))
    ):
        assert_same_step(train_stack(model), expected)


class Called(Stack):
    """Called as `autotune` calls a model: by keywords, for a loss."""

    def forward(self, x):
        return {"loss": super().forward(x)}


@pytest.mark.parametrize("store", [pytest.param(0, marks=pytest.mark.slow), "64MiB"])
def test_autotune_never_runs_experts_again_that_past_batches_change(store, tmp_path):
    torch.manual_seed(0)
    model = Called([Balanced() for _ in range(4)]).train()
    x = torch.randn(2, 64, 32)
    budget = Budget(device="8GiB", store=store, store_at=f"file:{tmp_path}" if store else None)
    plan = autotune(model, {"x": x}, budget)
    assert {layer.mode for layer in plan.layers} <= {"keep", "whole"}


@pytest.mark.slow
def test_autotune_plans_for_mixtral_and_gradients_are_autograds(tmp_path):
    model = make_model("mixtral", num_layers=4)
    ids = make_batch()
    batch = {"input_ids": ids, "labels": ids, "use_cache": False}
    expected = train(model)
    plan = autotune(model, batch, Budget(device="8GiB", store="64MiB", store_at=f"file:{tmp_path}"))
    assert len(plan.layers) == 4
    with apply(model, plan):
        assert_same_step(train(model), expected)
