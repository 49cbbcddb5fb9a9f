"""A model under a plan of memo: saved by bytecheckpoint, and trained by hydraulis' engine."""

from functools import partial

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import bytecheckpoint
import hydraulis
import memo
from memo.planner.layer_plan import LayerPlan
from shared.comms import RankPool

LENGTHS = (30, 7, 2, 13, 5, 11)
PLANS = {
    "half": memo.Plan.fixed(alpha=0.5),
    "whole": memo.Plan(layers=(LayerPlan(mode="whole"),)),
}


def make_model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config).train()


def make_state():
    model = make_model()
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-2)}


def train(state, numbers):
    """Losses of steps on batches of these numbers."""
    losses = []
    for number in numbers:
        ids = torch.randint(0, 97, (2, 40), generator=torch.Generator().manual_seed(number))
        loss = state["model"](input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        state["optimizer"].step()
        state["optimizer"].zero_grad()
        losses.append(loss.item())
    return losses


def assert_same_weights(found, expected):
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], one) for name, one in expected.items())


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_a_checkpoint_of_a_planned_model_is_gone_on_with_without_memo(plan, tmp_path):
    expected = make_state()
    losses = train(expected, range(4))
    saved = make_state()
    with memo.apply(saved["model"], plan) as run, bytecheckpoint.Checkpointer(tmp_path) as files:
        assert train(saved, range(2)) == losses[:2]
        files.save(2, saved)
        assert train(saved, [2]) == losses[2:3], "while the checkpoint is written"
        assert run.num_restored == 3 * 4
    resumed = make_state()
    assert bytecheckpoint.Checkpointer(tmp_path).load_latest(resumed) == 2
    assert train(resumed, [2, 3]) == losses[2:]
    assert_same_weights(resumed["model"].state_dict(), expected["model"].state_dict())


def test_a_checkpoint_is_loaded_into_a_planned_model(tmp_path):
    expected = make_state()
    losses = train(expected, range(2))
    bytecheckpoint.save(tmp_path / "start", expected)
    losses += train(expected, range(2, 4))
    resumed = make_state()
    with memo.apply(resumed["model"], PLANS["half"]):
        bytecheckpoint.load(tmp_path / "start", resumed)
        assert train(resumed, range(2, 4)) == losses[2:]
    assert_same_weights(resumed["model"].state_dict(), expected["model"].state_dict())


def steps_of_engine(plan, strategy=None):
    """Losses and weights of an engine's steps; under a plan also how many layers were restored."""
    engine = hydraulis.Engine(
        make_model(), partial(torch.optim.AdamW, lr=1e-2), max_tokens=64, strategy=strategy
    )

    def run_steps():
        losses = []
        for number in range(2):
            generator = torch.Generator().manual_seed(number)
            texts = [torch.randint(0, 97, (length,), generator=generator) for length in LENGTHS]
            losses.append(engine.step(texts).loss)
        return losses

    if plan is None:
        return run_steps(), engine.state_dict(), 0, 0
    with memo.apply(engine.model, plan) as run:
        losses = run_steps()
    return losses, engine.state_dict(), run.num_restored, run.store_bytes


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_an_engine_trains_a_planned_model_alike(plan):
    losses, weights, _, _ = steps_of_engine(None)
    found, after, num_restored, _ = steps_of_engine(plan)
    assert found == losses
    assert_same_weights(after, weights)
    assert num_restored > 0


def test_attention_by_document_is_stored_and_not_computed_again():
    """The engine names another attention than the model had when the plan was applied."""
    attention = memo.Plan(
        layers=(LayerPlan(mode="restore", stored={"input": 1.0, "attention": 1.0}),)
    )
    only_input = memo.Plan(layers=(LayerPlan(mode="restore", stored={"input": 1.0}),))
    losses, _, _, stored = steps_of_engine(attention)
    again, _, _, less = steps_of_engine(only_input)
    assert losses == again
    assert stored > less


def test_an_engine_over_two_ranks_trains_a_planned_model_alike():
    """Every document over both ranks: attention sends messages, in the forward and the backward only."""
    with RankPool(2) as pool:
        expected = pool.run(steps_of_engine, None, "cp2").results
        found = pool.run(steps_of_engine, PLANS["half"], "cp2").results
    for (losses, weights, _, _), (same, after, num_restored, _) in zip(
        expected, found, strict=True
    ):
        assert same == losses
        assert_same_weights(after, weights)
        assert num_restored > 0
