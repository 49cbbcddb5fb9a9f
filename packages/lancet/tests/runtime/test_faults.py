"""What goes wrong on ranks ends in a sentence that names it, and never in another result."""

import os
import re
import signal
from datetime import timedelta

import pytest
import torch
from lancet_models import MODULES, make_batch, make_model

import lancet
from lancet.runtime.verification import check_replicas, find_difference
from shared.comms import Group, RankPool
from shared.errors import ConfigError, DataError, RankFailure


def _differ():
    control = Group.control(name="test")
    same, other = torch.ones(3), torch.full((2,), float(Group.world().rank))
    check_replicas({"same": same}, control)
    with pytest.raises(DataError, match=r"others on some in other \(1 in all\).*clip_grad_norm_"):
        check_replicas({"same": same, "other": other}, control)


def test_replicas_that_differ_are_named(pool):
    pool.run(_differ)


def test_difference_of_bits():
    nan = torch.tensor([float("nan"), 0.0])
    assert find_difference([None, 3, nan], [None, 3, nan.clone()]) is None
    assert find_difference([torch.zeros(2)], [-torch.zeros(2)]) == 0
    assert find_difference([nan, nan], [nan, nan.double()]) == 1
    assert find_difference([nan, nan], [nan, nan[:1]]) == 1


def _refuse(settings, sentence):
    with pytest.raises(ConfigError, match=sentence):
        lancet.Backend(Group.world(), **settings)


def test_arguments_are_refused_in_a_sentence(pool):
    pool.run(_refuse, {"memory_bytes": -1}, "memory_bytes: expected 0 or more, got -1")
    pool.run(_refuse, {"partition": "all"}, "partition: expected .* got 'all'")


def _warn_of_torch(version):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "__version__", version)
        return lancet.Backend(Group.world()).report().sentences


def test_a_torch_that_was_not_tested_is_named(pool):
    for (sentence,) in pool.run(_warn_of_torch, "2.130.1").results:
        assert sentence.startswith(
            "expected torch 2.13.x, with which lancet is tested, got 2.130.1"
        )
    assert pool.run(_warn_of_torch, torch.__version__).results == [(), ()]


def _kill(is_compiled):
    torch._dynamo.reset()
    group = Group.world()
    model = lancet.parallelize(make_model(num_hidden_layers=1), group)
    step = model
    if is_compiled:
        step = torch.compile(model, backend=lancet.Backend(group), fullgraph=True)
    batch = make_batch(0).chunk(group.world_size)[group.rank]
    step(input_ids=batch, labels=batch).loss.backward()
    if group.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    step(input_ids=batch, labels=batch).loss.backward()


@pytest.mark.parametrize(
    "is_compiled", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["eager", "compiled"]
)
def test_a_rank_that_dies_in_an_exchange_is_named(is_compiled):
    with (
        pytest.raises(RankFailure) as caught,
        RankPool(2, timeout=timedelta(minutes=5), modules=MODULES) as pool,
    ):
        pool.run(_kill, is_compiled)
    text = str(caught.value)
    assert re.search(r"rank 1 of 2.*(died|SIGKILL|signal)", text)
    node = "forward 0: all_to_all_single" if is_compiled else "model.layers.0.mlp.experts"
    assert re.search(rf"rank 0: .* rank 1 failed .*{re.escape(node)}", text)


def _drift():
    torch._dynamo.reset()
    group = Group.world()
    model = lancet.parallelize(make_model(num_hidden_layers=1), group)
    step = torch.compile(model, backend=lancet.Backend(group), fullgraph=True)
    batch = make_batch(0).chunk(group.world_size)[group.rank]
    for number in range(100):
        if number == 50:
            with torch.no_grad():
                model.get_parameter("lm_head.weight").mul_(1 + group.rank)
        try:
            step(input_ids=batch, labels=batch).loss.backward()
        except DataError as error:
            return number, str(error)
    return None


@pytest.mark.slow
def test_replicas_that_drift_are_noticed(pool):
    for number, sentence in pool.run(_drift).results:
        assert number == 99
        assert "lm_head" in sentence
