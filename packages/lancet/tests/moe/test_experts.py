"""Models whose experts are divided over ranks train as in one process, without a compiler."""

import copy
from datetime import timedelta
from typing import Any

import pytest
import torch
from lancet_models import (
    MODULES,
    largest_difference,
    make_batch,
    make_model,
    train_alone,
    whole_gradients,
    whole_state,
)
from torch.distributed.tensor import DTensor

import lancet
from shared.comms import Group, RankPool
from shared.errors import ConfigError


def _train(num_steps, family, settings, num_ranks=2):
    group = Group.of(range(num_ranks))
    if group.rank < 0:
        return None
    model = lancet.parallelize(make_model(family, **settings), group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(num_steps):
        batch = make_batch(step).chunk(group.world_size)[group.rank]
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return whole_state(model)


@pytest.mark.parametrize(
    ("family", "settings"),
    [("qwen3", {}), ("mixtral", {}), ("qwen3", {"tie_word_embeddings": True})],
)
def test_training_equals_one_process(pool, family, settings):
    expected = train_alone(4, family, **settings)
    for weights in pool.run(_train, 4, family, settings).results:
        assert largest_difference(weights, expected) < 2e-6


def test_training_of_one_rank_equals_that_without_ranks(pool):
    weights, _ = pool.run(_train, 4, "qwen3", {}, 1).results
    assert largest_difference(weights, train_alone(4)) < 2e-6


@pytest.mark.slow
def test_training_on_four_ranks_equals_one_process():
    with RankPool(4, timeout=timedelta(minutes=3), modules=MODULES) as ranks:
        results = ranks.run(_train, 4, "qwen3", {}, 4).results
    expected = train_alone(4)
    assert all(largest_difference(weights, expected) < 2e-6 for weights in results)


def _accumulate():
    group = Group.world()
    model = lancet.parallelize(make_model(), group)
    for step in range(2):
        batch = make_batch(step).chunk(group.world_size)[group.rank]
        model(input_ids=batch, labels=batch).loss.backward()
    return whole_gradients(model)


def test_gradients_accumulate(pool):
    model = make_model()
    for step in range(2):
        batch = make_batch(step)
        model(input_ids=batch, labels=batch).loss.backward()
    for gradients in pool.run(_accumulate).results:
        assert largest_difference(gradients, whole_gradients(model)) < 2e-6


def _copy():
    group = Group.world()
    model = lancet.parallelize(make_model(), group)
    twin = copy.deepcopy(model)
    batch = make_batch(0).chunk(group.world_size)[group.rank]
    with torch.no_grad():
        for weight in model.parameters():
            weight.zero_()
    twin(input_ids=batch, labels=batch).loss.backward()
    assert not whole_gradients(model)
    return whole_gradients(twin)


def test_a_copy_trains_its_own_experts(pool):
    model = make_model()
    batch = make_batch(0)
    model(input_ids=batch, labels=batch).loss.backward()
    for gradients in pool.run(_copy).results:
        assert largest_difference(gradients, whole_gradients(model)) < 2e-6


def _freeze_and_unfreeze():
    group = Group.world()
    model = make_model()
    frozen = model.get_parameter("model.embed_tokens.weight").requires_grad_(False)
    lancet.parallelize(model, group)
    frozen.requires_grad_(True)
    model.get_parameter("lm_head.weight").requires_grad_(False)
    batch = make_batch(0).chunk(group.world_size)[group.rank]
    model(input_ids=batch, labels=batch).loss.backward()
    return whole_gradients(model)


def test_weights_may_be_unfrozen_later(pool):
    model = make_model()
    model.get_parameter("lm_head.weight").requires_grad_(False)
    batch = make_batch(0)
    model(input_ids=batch, labels=batch).loss.backward()
    for gradients in pool.run(_freeze_and_unfreeze).results:
        assert largest_difference(gradients, whole_gradients(model)) < 2e-6


def _one_expert():
    group = Group.world()
    model = make_model()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("gate.weight"):
                weight.zero_()
    lancet.parallelize(model, group)
    batch = make_batch(0).chunk(group.world_size)[group.rank]
    model(input_ids=batch, labels=batch).loss.backward()
    return whole_gradients(model)


def test_all_tokens_may_go_to_one_rank(pool):
    model = make_model()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("gate.weight"):
                weight.zero_()
    batch = make_batch(0)
    model(input_ids=batch, labels=batch).loss.backward()
    for gradients in pool.run(_one_expert).results:
        assert largest_difference(gradients, whole_gradients(model)) < 2e-6


def _states():
    group = Group.world()
    torch.manual_seed(group.rank)
    model = make_model()
    with torch.no_grad():
        model.get_parameter("lm_head.weight").add_(group.rank)
    lancet.parallelize(model, group)
    experts = model.state_dict()["model.layers.0.mlp.experts.down_proj"]
    assert isinstance(experts, DTensor)
    assert experts.placements[0].is_shard(0)
    return whole_state(model)


def test_all_ranks_start_with_the_first_ones_weights(pool):
    expected = whole_state(make_model())
    for weights in pool.run(_states).results:
        assert largest_difference(weights, expected) == 0


def _refuse(settings, world_size_error):
    group = Group.world()
    model = make_model(**settings)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ConfigError, match=world_size_error):
        lancet.parallelize(model, group)
    after = model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)


def _refuse_twice():
    model = lancet.parallelize(make_model(), Group.world())
    with pytest.raises(ConfigError, match="whole weight, got a DTensor"):
        lancet.parallelize(model, Group.world())


def _refuse_dense():
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2,
    )  # fmt: skip
    with pytest.raises(ConfigError, match=r"names its experts.*lancet\.moe\.Layer"):
        lancet.parallelize(AutoModelForCausalLM.from_config(config), Group.world())
    with pytest.raises(ConfigError, match=r"call lancet\.parallelize"):
        lancet.export(torch.nn.Linear(1, 1), "out")


def _refuse_quantised():
    model = make_model()
    experts: Any = model.get_submodule("model.layers.1.mlp.experts")
    whole = experts.down_proj.detach()
    experts.down_proj = torch.nn.Parameter(whole.to(torch.int8), requires_grad=False)
    with pytest.raises(ConfigError, match=r"layers\.1\.mlp\.experts\.down_proj.*quantisation"):
        lancet.parallelize(model, Group.world())


def _refuse_old_optimizer():
    group = Group.world()
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    lancet.parallelize(model, group)
    batch = make_batch(0).chunk(group.world_size)[group.rank]
    model(input_ids=batch, labels=batch).loss.backward()
    with pytest.raises(ConfigError, match=r"experts\.gate_up_proj.*after lancet\.parallelize"):
        optimizer.step()


def test_bad_input_is_refused_in_a_sentence(pool):
    pool.run(_refuse, {"num_experts": 7}, "divides by 2 ranks, got 7")
    pool.run(_refuse_twice)
    pool.run(_refuse_dense)
    pool.run(_refuse_quantised)
    pool.run(_refuse_old_optimizer)


def _clip(max_norm):
    group = Group.world()
    model = lancet.parallelize(make_model(), group)
    batch = make_batch(0).chunk(group.world_size)[group.rank]
    model(input_ids=batch, labels=batch).loss.backward()
    with pytest.raises(RuntimeError, match=r"mixed torch\.Tensor and DTensor"):
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    norm = lancet.clip_grad_norm_(model, max_norm)
    return norm.item(), whole_gradients(model)


@pytest.mark.parametrize("max_norm", [0.1, 1e6])
def test_clipping_takes_the_norm_over_all_ranks(pool, max_norm):
    model = make_model()
    batch = make_batch(0)
    model(input_ids=batch, labels=batch).loss.backward()
    expected = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm).item()
    results = pool.run(_clip, max_norm).results
    assert len({norm for norm, _ in results}) == 1
    for norm, gradients in results:
        assert norm == pytest.approx(expected, rel=1e-5)
        assert largest_difference(gradients, whole_gradients(model)) < 2e-6


def _export(folder):
    model = lancet.parallelize(make_model(), Group.world())
    lancet.export(model, folder)


def test_exported_folder_holds_the_whole_model(pool, tmp_path):
    from transformers import AutoModelForCausalLM

    pool.run(_export, str(tmp_path))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert largest_difference(whole_state(loaded), whole_state(make_model())) == 0
