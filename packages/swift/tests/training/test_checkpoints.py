"""Checkpoints of a run that cannot be written."""

import os

import pytest
import torch

from shared.comms.init import joined
from shared.errors import DiskFullError
from swift import Every


class OneTensor:
    """A trainable on one rank: a tensor, and the rest of a state."""

    def versions(self):
        return [1, 1]

    def prepare(self, entry):
        return {"weight": torch.zeros(50_000)}

    def state_of(self, entry):
        return {"rest": torch.zeros(4, dtype=torch.uint8)}

    def replica_sets(self, world_size):
        return [[0]]


@pytest.mark.unchecked  # the tensor is no trainable of ours
def test_a_full_disk_is_named_and_leaves_the_checkpoint_before(tmp_path, small_disk):
    folder = small_disk(300_000)
    every = Every(1, folder)
    with joined() as group:
        every.save(group, OneTensor(), 1)
        with pytest.raises(DiskFullError) as caught:
            every.save(group, OneTensor(), 2)
    start = f"{folder}/step-2: expected room on the disk for what is written there, got "
    assert str(caught.value).startswith(start)
    assert str(caught.value).count("\n") == 0
    assert every.latest() == 1
    assert os.path.exists(folder / "step-1" / "COMMITTED")
