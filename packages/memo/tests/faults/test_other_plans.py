"""Plans at work on other layers and other batches than they were made for."""

import json
from dataclasses import replace

import pytest
import torch
from torch import nn

from memo import Plan, apply
from memo.planner.layer_plan import LayerPlan
from memo.runtime.layers import kind_of
from shared.errors import ConfigError, DataError

from ..runtime.models import Block, assert_same_step, make_stack, train_stack
from .steps import HALF

pytestmark = pytest.mark.unchecked  # models are trained

PLANNED = replace(HALF, input_shape=(2, 64, 32))


@pytest.mark.parametrize(
    ("shape", "fits"),
    [
        ((2, 64, 32), True),
        ((1, 64, 32), True),
        ((8, 16, 32), True),
        ((128, 32), False),
        ((64, 32), True),
        ((2, 65, 32), False),
        ((3, 64, 32), False),
        ((1, 100, 32), False),
    ],
)
@pytest.mark.parametrize(
    "plan",
    [PLANNED, replace(PLANNED, layers=(LayerPlan(),))],
    ids=["restored", "kept"],
)
def test_a_batch_larger_than_the_planned_one_is_refused_before_its_first_layer(plan, shape, fits):
    model, x = make_stack(), torch.randn(shape)
    with apply(model, plan) as run:
        if fits:
            model(x).backward()
        else:
            with pytest.raises(ConfigError, match=r"at most the planned 2 sequences of 64 tokens"):
                model(x)
            assert run.store_bytes == 0
        assert_same_step(train_stack(model), train_stack(make_stack()))


def test_a_large_batch_may_be_evaluated():
    model = make_stack()
    with apply(model, PLANNED), torch.no_grad():
        model(torch.randn(2, 640, 32))


def widen(model):
    model.layers[1].up = nn.Linear(32, 65)
    model.layers[1].down = nn.Linear(65, 32)


def rename(model):
    model.layers[1].other = model.layers[1].up
    del model.layers[1].up


def round_all(model):
    model.bfloat16()


def derive(model):
    class Other(Block):
        pass

    for layer in model.layers:
        layer.__class__ = Other


@pytest.mark.parametrize("change", [widen, rename, round_all, derive])
def test_layers_of_another_kind_are_refused_and_left_as_they_are(change):
    model = make_stack()
    plan = replace(
        HALF, layers=HALF.layers * 3, layer_kinds=tuple(kind_of(one) for one in model.layers)
    )
    with apply(model, plan):
        assert_same_step(train_stack(model), train_stack(make_stack()))
    change(model)
    with pytest.raises(
        ConfigError, match=r"that it was made for, layer \d of them Block with 4,\d+ .*, got "
    ):
        apply(model, plan)
    assert not any("forward" in vars(layer) for layer in model.layers)


def test_files_say_what_a_plan_was_made_for_and_older_ones_do_not(tmp_path):
    path = tmp_path / "plan.json"
    plan = replace(PLANNED, layer_kinds=("Block",))
    plan.save(path)
    assert Plan.load(path) == plan
    record = json.loads(path.read_text())
    path.write_text(
        json.dumps({k: v for k, v in record.items() if k not in ("layer_kinds", "input_shape")})
    )
    assert Plan.load(path) == HALF


@pytest.mark.parametrize(
    ("field", "value"),
    [("layer_kinds", "Block"), ("layer_kinds", ["A", "B"]), ("input_shape", ["x"]), ("input_shape", [])],
)  # fmt: skip
def test_files_that_say_it_wrongly_are_refused(tmp_path, field, value):
    path = tmp_path / "plan.json"
    PLANNED.save(path)
    path.write_text(json.dumps({**json.loads(path.read_text()), field: value}))
    with pytest.raises(DataError, match=f"plan.{field}: expected"):
        Plan.load(path)
