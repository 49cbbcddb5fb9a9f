"""Ranks that hold different values of what should be the same."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import bytecheckpoint as bcp
from bytecheckpoint.saving.replicas import check_replicas
from shared.comms import RankPool
from shared.errors import DataError


@pytest.fixture(scope="module")
def four():
    with RankPool(4) as pool:
        yield pool


def _state(drifted=(), *, size=64):
    """A replicated weight, a scalar, and a matrix sharded over pairs of ranks."""
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2, 2))
    local = torch.arange(4.0).view(2, 2).to(torch.bfloat16) + rank % 2
    state = {
        "weight": torch.arange(float(size)),
        "scale": torch.tensor(3.0),
        "grid": DTensor.from_local(local, mesh, (Replicate(), Shard(0)), run_check=False),
        "none": torch.empty(0, 5),
        "strided": torch.arange(6.0)[::2],
        "conjugate": torch.ones(3, dtype=torch.complex64).conj(),
    }
    for name, ranks in drifted:
        if rank in ranks:
            with torch.no_grad():
                getattr(state[name], "_local_tensor", state[name]).view(-1)[-1] += 1
    return state


def _attempts(path, stage):
    """Saves a state twice, drifts, and saves again: what each attempt raised."""
    raised = []
    ckpt = bcp.Checkpointer(path, stage=stage, verify_replicas=True)
    for step, drifted in enumerate(
        [(), (), [("weight", [2])], [("scale", [0])], [("grid", [3])], [("grid", [1, 3])], ()]
    ):
        try:
            ckpt.save(step, _state(drifted)).committed.result(60)
            raised.append("")
        except DataError as error:
            raised.append(str(error))
    steps = ckpt.steps()
    ckpt.close()
    return raised, steps


@pytest.mark.parametrize("stage", ["arena", "fork"])
def test_values_that_differ_are_refused_and_named(four, tmp_path, stage):
    results = four.run(_attempts, tmp_path, stage).results
    assert all(result == results[0] for result in results), "all ranks raise the same"
    raised, steps = results[0]
    assert [bool(text) for text in raised] == [False, False, True, True, True, False, False]
    assert steps == [0, 1, 5, 6]
    assert "weight: expected equal values of" in raised[2]
    assert "different ones on ranks 0 and 2;" in raised[2]
    assert "scale" in raised[3]
    assert "ranks 0 and 1;" in raised[3]
    assert "grid" in raised[4]
    assert "ranks 1 and 3;" in raised[4], "the ranks of one shard"


def _checks(drifted):
    state = {f"w{i}": torch.full((3,), float(i)) for i in range(100)}
    if dist.get_rank() in drifted:
        for value in state.values():
            value += 1
    from bytecheckpoint.ranks.team import Team
    from bytecheckpoint.state.describe import describe

    team = Team()
    with pytest.raises(DataError) as caught:
        check_replicas(team, describe(state, team.rank).tensors)
    return str(caught.value)


def test_many_differing_tensors_are_one_short_message(four):
    (text,) = set(four.run(_checks, [1, 3]).results)
    assert "(and of 63 other boxes or more)" in text
    assert len(text) < 400


def _fail_to_hash(rank_that_fails):
    from bytecheckpoint.ranks.team import Team
    from bytecheckpoint.state.describe import describe

    team = Team()
    tensors = describe({"weight": torch.ones(3)}, team.rank).tensors
    if team.rank == rank_that_fails:
        dtype, shape, ((box, piece),) = tensors["weight"]
        tensors["weight"] = dtype, shape, [(box, piece.to("meta"))]
    with pytest.raises(Exception, match="meta") as caught:
        check_replicas(team, tensors)
    return f"rank {rank_that_fails}" in str(caught.value) or team.rank == rank_that_fails


def test_an_error_of_one_rank_is_raised_on_all(four):
    assert all(four.run(_fail_to_hash, 2).results)


def _save_drifted(path):
    rank = dist.get_rank()
    mean = {"mean": torch.full((16_000,), float(rank))}  # 64 kB, below 64 KiB
    large = torch.full((1 << 15,), float(rank))
    bcp.save(f"{path}/small", mean)
    with pytest.raises(DataError, match=r"weight: expected equal values .* on ranks 0 and 1"):
        bcp.save(f"{path}/large", mean | {"weight": large})
    bcp.save(f"{path}/unchecked", {"weight": large}, verify_replicas=False)
    shards = DTensor.from_local(large, init_device_mesh("cpu", (4,)), [Shard(0)], run_check=False)
    bcp.save(f"{path}/sharded", {"weight": shards})


def test_a_tensor_never_comes_from_ranks_that_differ_unless_asked(four, tmp_path):
    four.run(_save_drifted, tmp_path)
    mean = torch.empty(16_000)
    bcp.load(tmp_path / "small", {"mean": mean})
    assert torch.equal(mean, torch.zeros(16_000)), "small ones are the lowest rank's"
    assert not (tmp_path / "large").exists()
    bcp.load(tmp_path / "unchecked", {"weight": torch.empty(1 << 15)})
    weight = torch.empty(1 << 17)
    bcp.load(tmp_path / "sharded", {"weight": weight})
    assert weight[:: 1 << 15].tolist() == [0, 1, 2, 3]


def _save_replicas_of_pairs(path):
    """Which steps are refused where pairs of ranks hold the same shard, by the one that differs."""
    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (2, 2))
    refused = []
    for step, odd in enumerate([None, 3, 0]):
        local = torch.full((1 << 15,), float(rank % 2) + (rank == odd))
        grid = DTensor.from_local(local, mesh, (Replicate(), Shard(0)), run_check=False)
        try:
            bcp.save(f"{path}/{step}", {"grid": grid, "own": {f"{rank}": local}})
        except DataError as error:
            refused.append((step, str(error).rpartition("on ranks ")[2][:7]))
    return refused


def test_only_ranks_with_the_same_box_are_compared(four, tmp_path):
    (refused,) = set(map(tuple, four.run(_save_replicas_of_pairs, tmp_path).results))
    assert refused == ((1, "1 and 3"), (2, "0 and 2"))


def test_one_process_has_nothing_to_compare(tmp_path):
    bcp.save(tmp_path / "alone", {"x": torch.ones(3)}, verify_replicas=True)
