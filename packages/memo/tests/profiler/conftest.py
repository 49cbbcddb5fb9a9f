"""One small Llama on an H100 for all tests: counting its bytes takes longer than all that follows from them."""

import pytest
from llama_shape import SHAPE
from transformers import LlamaConfig

from memo.profiler.analytic.analysis import Analysis


@pytest.fixture(scope="session")
def analysis():
    return Analysis(LlamaConfig(**SHAPE), "H100")
