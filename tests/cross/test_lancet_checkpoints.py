"""A model with divided experts is saved by two ranks, in two formats, and trains on over one and four."""

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor

import bytecheckpoint as bcp
import lancet
from lancet.data import build_qwen3_moe
from shared.comms import Group, RankPool, all_reduce

NUM_STEPS, SAVED_STEP = 4, 2
TIMEOUT = timedelta(minutes=3)


def make_training() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = build_qwen3_moe(hidden_size=32, expert_width=24)
    lancet.parallelize(model, Group.world())
    return model, torch.optim.AdamW(model.parameters(), 1e-2)


def make_ids(step: int) -> torch.Tensor:
    """Token ids of all ranks together, as many rows as the most ranks."""
    return torch.randint(0, 256, (4, 16), generator=torch.Generator().manual_seed(step))


def train(model: Any, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    """The mean of the ranks' losses in each step."""
    group, losses = Group.world(), []
    for step in steps:
        ids = make_ids(step).chunk(group.world_size)[group.rank]
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(all_reduce(group, loss.detach().clone()).item() / group.world_size)
    return losses


def train_and_save(folder: str) -> list[float]:
    model, optimizer = make_training()
    losses = train(model, optimizer, range(SAVED_STEP))
    with bcp.Checkpointer(f"{folder}/bytecheckpoint") as checkpointer:
        checkpointer.save(SAVED_STEP, {"model": model, "optimizer": optimizer})
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=f"{folder}/dcp")
    return losses + train(model, optimizer, range(SAVED_STEP, NUM_STEPS))


def load_and_train(folder: str, form: str) -> list[float]:
    model, optimizer = make_training()
    with torch.no_grad():  # nothing may be left as it was built
        for weight in model.parameters():
            weight.zero_()
    if form == "dcp":
        weights, moments = get_state_dict(model, optimizer)
        dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=f"{folder}/dcp")
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    else:
        with bcp.Checkpointer(f"{folder}/bytecheckpoint") as checkpointer:
            step = checkpointer.load_latest({"model": model, "optimizer": optimizer})
        assert step == SAVED_STEP
    experts = model.get_parameter("model.layers.0.mlp.experts.down_proj")
    assert isinstance(experts, DTensor)
    assert experts.to_local().shape[0] == 8 // Group.world().world_size
    moment = optimizer.state[experts]["exp_avg"]
    assert isinstance(moment, DTensor)
    assert moment.placements[0].is_shard(0)
    return train(model, optimizer, range(SAVED_STEP, NUM_STEPS))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("saved"))
    with RankPool(2, timeout=TIMEOUT) as pool:
        losses, others = pool.run(train_and_save, folder).results
    assert losses == others
    return folder, losses


def test_divided_experts_train_as_whole_ones(saved):
    model = build_qwen3_moe(hidden_size=32, expert_width=24)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    for step, expected in enumerate(saved[1]):
        ids = make_ids(step)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert loss.item() == pytest.approx(expected, abs=2e-6)


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [1, 4])
def test_training_goes_on_over_other_ranks(saved, num_ranks):
    folder, losses = saved
    with RankPool(num_ranks, timeout=TIMEOUT) as pool:
        for form in ("bytecheckpoint", "dcp"):
            for resumed in pool.run(load_and_train, folder, form).results:
                assert resumed == pytest.approx(losses[SAVED_STEP:], abs=2e-6)
