"""What `Sharded` refuses before anything runs, and what it says of itself."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import swift
from shared.errors import ConfigError


def place(rank=0, world_size=4):
    return SimpleNamespace(rank=rank, world_size=world_size, reads_whole_batches=False)


def make(mesh, *, whole=True, mode="exact", change=lambda module: None):
    module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    change(module)
    fully_shard(module if whole else module[1], mesh=mesh)
    return module, swift.undoable(torch.optim.Adam(module.parameters()), mode=mode)


@pytest.mark.parametrize(("world_size", "shards"), [(3, 2), (4, 0), (4, 8), (4, -2)])
def test_ranks_that_make_no_whole_replicas(world_size, shards):
    with pytest.raises(
        ConfigError, match=rf"divisor of the {world_size} ranks, got {shards}; give"
    ):
        swift.Sharded(make, place(world_size=world_size), shards=shards)


def test_a_parameter_that_is_not_sharded():
    with pytest.raises(ConfigError, match=r"expected 0\.weight as a DTensor .* got a plain tensor"):
        swift.Sharded(lambda mesh: make(mesh, whole=False), place(), shards=2)


def test_tensors_that_a_newcomer_would_not_get():
    def change(module):
        module[1].table = torch.ones(3)

    with pytest.raises(
        ConfigError, match=r"attribute 1\.table; make it by register_buffer\('table'"
    ):
        swift.Sharded(lambda mesh: make(mesh, change=change), place(), shards=2)


def test_a_vote_in_place_of_undoing():
    with pytest.raises(ConfigError, match="expected one that can undo, got 'commit'"):
        swift.Sharded(lambda mesh: make(mesh, mode="commit"), place(), shards=2)


def test_ranks_and_spares_describe_the_same_and_hold_nothing():
    sharded = [swift.Sharded(make, place(rank), shards=2) for rank in (1, None)]
    assert not dist.is_initialized()
    assert sharded[0].describe() == sharded[1].describe()
    assert "0.weight [4, 3] float32" in sharded[0].describe()["parameters"]
    assert sharded[0].describe()["shards"] == 2
    assert sharded[0].describe()["can_shrink"] is False
    assert all(one.is_meta for one in sharded[0].module.parameters())
    sharded[0].warm()
    assert not dist.is_initialized()


def test_columns_are_the_sets_of_replicas():
    sharded = swift.Sharded(make, place(world_size=6), shards=2)
    assert sharded.replica_sets(6) == [[0, 2, 4], [1, 3, 5]]


def test_before_the_loop_nothing_is_trained():
    sharded = swift.Sharded(make, place(), shards=2)
    with pytest.raises(ConfigError, match=r"expected backward inside run\.loop"):
        sharded.backward(torch.zeros((), requires_grad=True))
