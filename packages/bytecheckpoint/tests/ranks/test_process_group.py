"""Ranks of one process group save and load without the others."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist

import bytecheckpoint as bcp
from bytecheckpoint.ranks.liveness import Liveness
from bytecheckpoint.ranks.team import Team
from shared.comms import RankPool
from shared.errors import ConfigError


@pytest.fixture(scope="module")
def four():
    with RankPool(4) as pool:
        yield pool


def save_in_pairs(path):
    """Ranks 1 and 3 and ranks 0 and 2 each save and load on their own; what each loads."""
    rank = dist.get_rank()
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    own, other = groups[rank % 2], groups[1 - rank % 2]
    half = bcp.FlatShard(torch.full((5,), float(rank)), (10,), 5 * (rank // 2))
    with bcp.Checkpointer(path / f"pair-{rank % 2}", process_group=own) as ckpt:
        ckpt.save(1, {"x": half}).committed.result(60)
        steps = ckpt.steps()
    bcp.save(path / f"alone-{rank % 2}", {"x": half}, process_group=own)
    whole = torch.zeros(10)
    bcp.load(path / f"alone-{rank % 2}", {"x": whole}, process_group=own)
    with pytest.raises(ConfigError, match=f"a process group that rank {rank} is in"):
        bcp.Checkpointer(path / "other", process_group=other)
    return steps, whole.tolist()


def test_each_group_saves_and_loads_on_its_own(tmp_path, four):
    for rank, (steps, whole) in enumerate(four.run(save_in_pairs, tmp_path).results):
        assert steps == [1]
        assert whole == [rank % 2] * 5 + [2 + rank % 2] * 5
    with bcp.open(tmp_path / "pair-1" / "step_00000001") as checkpoint:
        assert checkpoint.world_size == 2


def say_who_listens():
    """In which of two groups the listening rank takes itself for the world's first."""
    rank = dist.get_rank()
    own = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
    said = []
    listen = Liveness.listen

    def told(self, is_first=True):
        said.append(is_first)
        return listen(self, is_first)

    with mock.patch.object(Liveness, "listen", told):
        Team(own).watch()
    return said


def test_only_the_first_rank_of_the_world_listens_at_its_address(four):
    assert four.run(say_who_listens).results == [[True], [False], [], []]
