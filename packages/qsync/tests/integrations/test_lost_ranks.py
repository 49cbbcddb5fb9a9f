import os
import signal
import time
from datetime import timedelta

import pytest
import torch
from torch import distributed, nn

import qsync
from shared.comms.launch import RankPool
from shared.errors import CommError, RankFailure


def _build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


def _die():
    ddp = qsync.DDP(_build())
    ddp(torch.ones(5, 6)).square().mean().backward()
    if distributed.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    ddp(torch.ones(5, 6)).square().mean().backward()


def test_a_killed_rank_ends_the_others_within_the_timeout():
    begun_s = time.monotonic()
    with (
        RankPool(2, timeout=timedelta(seconds=30)) as pool,
        pytest.raises(RankFailure, match="rank 1"),
    ):
        pool.run(_die)
    assert time.monotonic() - begun_s < 30


def test_without_ranks_it_says_how_to_start_them():
    with pytest.raises(CommError, match=r"torch\.distributed is not initialised"):
        qsync.DDP(_build())
