"""Small Llamas that tests share: counting bytes on an H100 takes longer than all that follows from them."""

import pytest
from llama_shape import SHAPE
from transformers import LlamaConfig

from memo.profiler.analytic.analysis import Analysis

from ..runtime.models import make_model


@pytest.fixture(scope="session")
def analysis():
    return Analysis(LlamaConfig(**SHAPE), "H100")


@pytest.fixture(scope="module")
def model():
    return make_model("llama", num_layers=4)
