"""transformers' Trainer with a plan, beside the same Trainer without."""

import logging
from dataclasses import replace
from functools import cache
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("accelerate", reason="transformers' Trainer asks for it")

from step_profiles import step_profile
from transformers import Trainer, TrainingArguments

from memo import Budget, DoesNotFit, Plan
from memo.integrations.trainer import MemoCallback, is_larger
from shared.errors import ConfigError

from ..runtime.models import make_batch, make_model

pytestmark = pytest.mark.unchecked


def run_trainer(folder, callbacks, *, name="llama", **settings):
    model = make_model(name)
    model.config.use_cache = False  # a cache changes the strides that attention sees
    rows = [{"input_ids": ids, "labels": ids} for ids in make_batch(rows=12, length=48)]
    arguments = TrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=2, gradient_accumulation_steps=2,
        num_train_epochs=1, learning_rate=1e-2, logging_steps=1, report_to=[], disable_tqdm=True,
        use_cpu=True, save_strategy="no", seed=3, **settings,
    )  # fmt: skip
    trainer = Trainer(model, arguments, train_dataset=rows, callbacks=callbacks)
    trainer.train()
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    return losses, {name: value.clone() for name, value in model.state_dict().items()}, model


@cache
def plain_run(name):
    """Losses and weights without a plan."""
    with TemporaryDirectory() as folder:
        return run_trainer(folder, [], name=name)[:2]


@pytest.mark.parametrize("name", ["llama", pytest.param("gpt2", marks=pytest.mark.slow)])
def test_losses_and_weights_are_those_without_a_plan(name, tmp_path):
    losses, state = plain_run(name)
    assert len(losses) == 3
    callback = MemoCallback(Plan.fixed(alpha=0.5, store=f"file:{tmp_path}"))
    found, after, model = run_trainer(tmp_path, [callback], name=name)
    assert found == losses
    assert all(torch.equal(one, after[key]) for key, one in state.items())
    assert callback.run.num_restored == 3 * 6
    assert not any("forward" in vars(module) for module in model.modules())


@pytest.mark.slow
def test_a_budget_is_planned_for_on_the_first_batch(tmp_path, caplog):
    """With dropout, and in an order that is drawn: whatever planning draws would show."""
    losses, state = plain_run("gpt2")
    budget = Budget(device="8GiB", store="1GiB", store_at=f"file:{tmp_path}")
    callback = MemoCallback(budget=budget)
    with caplog.at_level(logging.INFO, "memo.integrations.trainer"):
        found, after, _ = run_trainer(tmp_path, [callback], name="gpt2")
    assert found == losses, "measuring draws nothing from the training"
    assert all(torch.equal(one, after[key]) for key, one in state.items())
    assert callback.plan.explain() in caplog.text
    assert "memo's run:" in caplog.text


@pytest.mark.parametrize(
    ("shape", "planned", "wanted"),
    [
        ((2, 48), (2, 48), False),
        ((4, 24), (2, 48), False),
        ((2, 24), (2, 48), False),
        ((2, 49), (2, 48), True),
        ((1, 96), (2, 48), True),
        ((), (), False),
        ((2, 48), None, True),
    ],
)
def test_larger_batches_have_more_tokens_or_longer_rows(shape, planned, wanted):
    assert is_larger(shape, planned) == wanted


def test_larger_batches_and_steps_that_take_far_longer_are_planned_for_anew(monkeypatch):
    """By what the Trainer calls, with plans that predict next to nothing."""
    planned, model = [], make_model("llama")

    def autotune(model, batch, budget, *, optimizer_bytes=None):
        planned.append((tuple(batch["input_ids"].shape), optimizer_bytes))
        return replace(Plan.fixed(alpha=0.0), prediction={"step_s": 1e-9})

    monkeypatch.setattr("memo.integrations.trainer.autotune", autotune)
    monkeypatch.setattr(Plan, "explain", lambda _: "")
    callback = MemoCallback(budget=Budget(device="1TiB"))
    arguments = SimpleNamespace(gradient_accumulation_steps=1)
    callback.on_train_begin(arguments, None, None, model=model)
    for length in (16, 24, 16, 24, 24, 24, 24, 24):
        callback.on_step_begin(arguments, None, None)
        model(input_ids=make_batch(length=length), use_cache=False).logits.sum().backward()
        callback.on_pre_optimizer_step(arguments, None, None)
    callback.close()
    # The first, a longer one, and once as four steps took longer than they were predicted to.
    assert planned == [((2, 16), None), ((2, 24), 0), ((2, 24), 0)]


@pytest.mark.parametrize(("spent_s", "is_remade"), [(1.49, False), (1.51, True)])
def test_a_plan_is_remade_from_half_as_long_again_as_predicted(
    spent_s, is_remade, monkeypatch, caplog
):
    """The quickest of three steps counts, after one that makes buffers."""
    callback, clock = MemoCallback(budget=Budget(device="1TiB")), [0.0]
    callback.plan = replace(Plan.fixed(alpha=0.0), prediction={"step_s": 1.0})
    monkeypatch.setattr("memo.integrations.trainer.time.perf_counter", lambda: clock[0])
    arguments = SimpleNamespace(gradient_accumulation_steps=2)
    for step_s in (0.1, 9.0, 2 * spent_s, 8.0):
        callback.on_step_begin(arguments, None, None)
        clock[0] += step_s
        callback.on_pre_optimizer_step(arguments, None, None)
    assert ("planning once more" in caplog.text) == is_remade


def test_a_budget_that_is_too_small_ends_training_before_a_step(tmp_path, monkeypatch):
    monkeypatch.setattr("memo.profiler.autotune.measure_profile", lambda *_, **__: step_profile())
    with pytest.raises(DoesNotFit):
        run_trainer(tmp_path, [MemoCallback(budget=Budget(device="1MiB"))])


def test_checkpointing_beside_a_plan_is_refused(tmp_path):
    callback = MemoCallback(Plan.fixed(alpha=0.5))
    with pytest.raises(ConfigError, match="gradient_checkpointing_disable"):
        run_trainer(tmp_path, [callback], gradient_checkpointing=True)


def test_a_plan_or_a_budget_is_asked_for():
    with pytest.raises(ConfigError, match="got neither"):
        MemoCallback()
    with pytest.raises(ConfigError, match="got both"):
        MemoCallback(Plan.fixed(alpha=0.5), budget=Budget(device="1GiB"))
