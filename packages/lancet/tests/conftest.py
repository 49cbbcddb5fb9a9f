"""Lets tests import the models that several of them use, and gives them two ranks."""

import sys
from datetime import timedelta
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

MODULES = (
    "transformers.models.qwen3_moe.modeling_qwen3_moe",
    "transformers.models.mixtral.modeling_mixtral",
    "torch.distributed.tensor",
)
"""What all ranks import, here once for all of them."""


@pytest.fixture(scope="session")
def pool():
    from shared.comms import RankPool

    with RankPool(2, timeout=timedelta(minutes=5), modules=MODULES) as ranks:
        yield ranks
