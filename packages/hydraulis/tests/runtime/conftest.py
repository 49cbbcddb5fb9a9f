"""Ranks that the tests of this folder share: to start them takes longer than most tests."""

import pytest

from shared.comms import RankPool

MODULES = (
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen3.modeling_qwen3",
    "hydraulis.runtime.step_loader",
    "hypothesis.strategies",
)
"""What all ranks import, here once for all of them."""


@pytest.fixture(scope="package")
def ranks():
    with RankPool(4, modules=MODULES) as pool:
        yield pool
