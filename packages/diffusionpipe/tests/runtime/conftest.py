"""Ranks that the tests of a file share: to start them takes longer than most tests.

They end with the file: each group that a rank has made keeps a thread that wakes up a hundred times a
second, until the rank ends.
"""

import pytest
import torch

from shared.comms import RankPool

# Optimizers import torch._dynamo when they are made: here once for all ranks.
MODULES = (
    "diffusionpipe.runtime.engine",
    "diffusionpipe.runtime.virtual",
    "diffusionpipe.planner.schedule",
    "torch._dynamo",
)

# Of products as small as these, threads only wait for each other.
torch.set_num_threads(1)


@pytest.fixture(scope="module")
def ranks():
    with RankPool(4, modules=MODULES) as pool:
        yield pool


@pytest.fixture(scope="module")
def pair():
    with RankPool(2, modules=MODULES) as pool:
        yield pool
