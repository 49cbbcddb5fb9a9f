"""What applying a plan leaves as it was, and what it measures."""

import gc
import logging
import threading

import pytest
import torch
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from memo import Plan, apply
from memo.planner.layer_plan import LayerPlan
from memo.runtime.moving.threads import ThreadMover
from shared.errors import ConfigError

from .models import (
    Block,
    assert_same_gradients,
    assert_same_step,
    gradients,
    make_batch,
    make_model,
    make_stack,
    train,
    train_stack,
)

HALF = Plan.fixed(alpha=0.5)


def test_everything_is_as_before_while_a_plan_is_applied_and_after():
    model = make_model("llama")
    before = {
        "state": {name: value.data_ptr() for name, value in model.state_dict().items()},
        "parameters": [id(one) for one in model.parameters()],
        "modules": [(name, id(one)) for name, one in model.named_modules()],
    }

    def now():
        return {
            "state": {name: value.data_ptr() for name, value in model.state_dict().items()},
            "parameters": [id(one) for one in model.parameters()],
            "modules": [(name, id(one)) for name, one in model.named_modules()],
        }

    attention, own = ALL_ATTENTION_FUNCTIONS["sdpa"], set(ALL_ATTENTION_FUNCTIONS._local_mapping)
    attributes = [set(vars(layer)) for layer in model.model.layers]
    with apply(model, HALF) as run:
        assert now() == before
        train(model, num_batches=1)
        assert now() == before
    assert now() == before
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is attention
    assert set(ALL_ATTENTION_FUNCTIONS._local_mapping) == own
    assert [set(vars(layer)) for layer in model.model.layers] == attributes
    run.close()  # a second time does nothing


@pytest.mark.parametrize("name", ["sdpa", "mine", "eager"])
def test_attention_functions_are_restored(name):
    calls = []

    def mine(*args, **kwargs):
        calls.append(1)
        return ALL_ATTENTION_FUNCTIONS["sdpa"](*args, **kwargs)

    if name == "mine":
        ALL_ATTENTION_FUNCTIONS["mine"] = mine
    model = make_model("llama")
    model.set_attn_implementation(name)
    expected, before = train(model), ALL_ATTENTION_FUNCTIONS.get(name)
    with apply(model, HALF):
        assert_same_step(train(model), expected)
    assert ALL_ATTENTION_FUNCTIONS.get(name) is before
    if name == "mine":
        assert len(calls) == 2 * 9, "answered in the backward, not called again"
        del ALL_ATTENTION_FUNCTIONS["mine"]


@pytest.mark.unchecked
def test_layers_run_without_a_cache_of_keys_and_values_which_is_said_once(caplog):
    """A layer that runs again would fill it twice."""
    caplog.set_level(logging.INFO, "memo")
    model = make_model("llama")
    ids, found = make_batch(), []
    with apply(model, HALF):
        for use_cache in (True, True, False):
            model.zero_grad()
            out = model(input_ids=ids, labels=ids, use_cache=use_cache)
            out.loss.backward()
            found.append(gradients(model))
            if use_cache:
                assert out.past_key_values.get_seq_length() == 0
    assert_same_gradients(found[0], found[2])
    assert_same_gradients(found[1], found[2])
    assert [one for one in caplog.messages if "no cache" in one] == [
        "memo: training needs no cache of keys and values; layers are run without it"
    ]


@pytest.mark.unchecked
def test_two_models_may_have_plans_at_once():
    first, second = make_model("llama"), make_model("qwen3")
    expected = train(first), train(second)
    outer = apply(first, HALF)
    inner = apply(second, HALF)
    assert_same_step(train(first), expected[0])
    assert_same_step(train(second), expected[1])
    outer.close()  # not in the order of applying
    assert_same_step(train(second), expected[1])
    inner.close()
    assert_same_step(train(first), expected[0])
    assert ALL_ATTENTION_FUNCTIONS._local_mapping == {}


@pytest.mark.unchecked
def test_only_given_layers_take_part():
    model = make_model("llama", num_layers=4)
    expected = train(model)
    with apply(model, HALF, layers=model.model.layers[1:3]) as run:
        assert_same_step(train(model), expected)
        assert run.num_restored == 2 * 3


def test_a_module_that_is_called_again_and_again_is_one_layer():
    block = Block()
    model = make_stack(lambda: block)
    expected = train_stack(model)
    with apply(model, HALF) as run:
        assert len(run.plan.layers) == 1
        assert_same_step(train_stack(model), expected)
        assert run.num_restored == 3 * 2
    assert "forward" not in vars(block)


def test_layers_that_are_kept_are_not_touched():
    model = make_model("llama")
    plan = Plan(layers=(LayerPlan(), *HALF.layers, LayerPlan()))
    expected = train(model)
    with apply(model, plan) as run:
        touched = ["forward" in vars(layer) for layer in model.model.layers]
        assert touched == [False, True, True], "when the last one is over, copies come back"
        assert_same_step(train(model), expected)
        assert run.num_restored == 3


def test_a_plan_that_keeps_everything_touches_nothing():
    model = make_model("llama")
    own = set(ALL_ATTENTION_FUNCTIONS._local_mapping)
    with apply(model, Plan(layers=(LayerPlan(),))):
        assert not any("forward" in vars(layer) for layer in model.model.layers)
        assert set(ALL_ATTENTION_FUNCTIONS._local_mapping) == own


@pytest.mark.unchecked
@pytest.mark.parametrize("num_buffers", [1, 2, 3])
@pytest.mark.parametrize("kept", [0, 2])
def test_all_layers_are_fetched_before_their_backward_asks(num_buffers, kept, monkeypatch):
    """Only with one buffer is there nobody who could fetch ahead."""
    model = make_model("llama", num_layers=6)
    plan = Plan(layers=HALF.layers * (6 - kept) + (LayerPlan(),) * kept, num_buffers=num_buffers)
    late, begin = [], ThreadMover.await_fetched

    def ask(mover, cargo):
        late.append(cargo.fetched is None)
        begin(mover, cargo)

    monkeypatch.setattr(ThreadMover, "await_fetched", ask)
    with apply(model, plan) as run:
        train(model, num_batches=2)
        assert run.num_spare_buffers == 0
    assert sum(late) == (0 if num_buffers > 1 else 2 * (5 - kept))


def test_nothing_is_held_after_a_step():
    model = make_model("llama")
    with apply(model, HALF) as run:
        gc.disable()  # what reference counts free is free at once
        try:
            train(model, num_batches=1)
            needed = run.store_bytes
            train(model, num_batches=3)
        finally:
            gc.enable()
        assert run.store_bytes == needed
        assert run.num_spare_buffers == 0


def held_bytes():
    """Bytes of all tensors that are alive."""
    gc.collect()
    storages = {
        one.untyped_storage().data_ptr(): one.untyped_storage().nbytes()
        for one in gc.get_objects()
        if isinstance(one, torch.Tensor)
    }
    return sum(storages.values())


@pytest.mark.unchecked
def test_activations_leave_the_device():
    """Of eight layers at most two are on their way and two fetched when the forward is over."""
    model = make_model("llama", num_layers=8)
    everything = LayerPlan(mode="restore", stored={"input": 1, "attention": 1}, default_fraction=1)
    ids = torch.zeros(2, 48, dtype=torch.int64)
    held, stored = [], 0
    for plan in (LayerPlan(mode="whole"), everything, LayerPlan()):
        with apply(model, Plan(layers=(plan,))) as run:
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            held.append(held_bytes())
            if plan is everything:
                stored = run.store_bytes
            loss.backward()
            del loss
    assert held[1] <= held[2] - stored * 4 / 8
    assert held[0] <= held[2] - stored * 4 / 8


def test_threads_end_with_the_run(tmp_path):
    before = threading.active_count()
    with apply(make_stack(), Plan.fixed(alpha=0.5, store=f"file:{tmp_path}")) as run:
        train_stack(make_stack())
        assert run.times.sent_bytes == 0
    assert threading.active_count() == before


def test_a_list_of_layers_is_found_in_models_of_ones_own():
    model = nn.ModuleDict({"decoder": make_stack(num_layers=5), "head": make_stack(num_layers=2)})
    with apply(model, HALF) as run:
        assert len(run.plan.layers) == 5
    with pytest.raises(ConfigError, match=r"layers: expected submodules of the model, got 0"):
        apply(model, HALF, layers=[])


def test_closing_leaves_wrappers_that_came_later_in_place():
    """They go on to the layer's own forward."""
    model = make_stack()
    expected = train_stack(model)
    run = apply(model, HALF)
    layer, seen = model.layers[1], []
    inner = layer.forward

    def wrapper(*args):
        seen.append(1)
        return inner(*args)

    layer.forward = wrapper
    run.close()
    assert layer.forward is wrapper
    assert not any("forward" in vars(one) for one in (model.layers[0], model.layers[2]))
    assert_same_step(train_stack(model), expected)
    assert len(seen) == 2


PREDICTED = {"store_bytes": 0, "details": {"busy": "0.31"}}


def run_steps(model, plan, train):
    with apply(model, plan) as run:
        train(model(make_batch()).logits.sum())
    return run


@pytest.mark.parametrize("mode", ["restore", "keep"])
@pytest.mark.parametrize(("predicted_s", "is_longer"), [(None, False), (1e-9, True), (1e9, False)])
def test_a_report_compares_steps_with_their_prediction(mode, predicted_s, is_longer):
    layer = LayerPlan(mode=mode, resident=frozenset({"input"} if mode == "restore" else ()))
    prediction = PREDICTED if predicted_s is None else {**PREDICTED, "step_s": predicted_s}
    model = make_model("llama", num_layers=2)
    plan = Plan(layers=(layer,) * 2, input_shape=(2, 48, 64), prediction=prediction)
    run = run_steps(model, plan, lambda loss: loss.backward())
    assert len(run.step_s) == 1
    lines = run.report().splitlines()
    (step,) = (line for line in lines if line.startswith("step "))
    assert ("predicted" in step) == (predicted_s is not None)
    assert any(line.startswith("longer ") for line in lines) == is_longer
    assert any(line.startswith("busy ") and "31%" in line for line in lines)


def test_steps_between_which_others_come_are_not_timed():
    model = make_model("llama", num_layers=2)
    with apply(model, HALF) as run:
        first, second, third = (model(make_batch(number)).logits.sum() for number in range(3))
        third.backward()
        assert len(run.step_s) == 1
        first.backward()
        second.backward()
        assert len(run.step_s) == 1
        last = model(make_batch()).logits.sum()
        last.backward()
    assert len(run.step_s) == 2
    assert "the quickest of 2" in run.report()


def test_a_report_says_nothing_of_steps_that_were_not_run_backward():
    run = run_steps(make_model("llama", num_layers=2), HALF, lambda _: None)
    assert not any(line.startswith("step ") for line in run.report().splitlines())
