"""Draws: their distribution, what they depend on, and what is left out."""

import pytest
import torch

from llmpq.runtime.sampling import Sampling
from shared.errors import ConfigError

ROWS = 4000
PROMPTS = torch.arange(ROWS)


def drawn(logits, position=0, prompts=PROMPTS, **settings):
    sampling = Sampling(**{"temperature": 1.0, **settings})
    return sampling.choose(logits.expand(len(prompts), -1), prompts, position)


def test_tokens_are_drawn_as_often_as_they_are_probable():
    logits = torch.tensor([1.0, 0.0, -1.0, 2.0])
    for temperature in (1.0, 0.5, 3.0):
        counts = drawn(logits, temperature=temperature).bincount(minlength=4) / ROWS
        expected = (logits / temperature).softmax(-1)
        assert (counts - expected).abs().max() < 0.03
    assert (drawn(logits, temperature=0.0) == 3).all()


def test_the_least_probable_tokens_are_left_out_and_the_others_share():
    counts = drawn(torch.zeros(4), top_p=0.5).bincount(minlength=4) / ROWS
    assert counts[2:].sum() == 0
    assert counts[:2].tolist() == pytest.approx([0.5, 0.5], abs=0.03)
    counts = drawn(torch.zeros(4), top_p=0.51).bincount(minlength=4) / ROWS
    assert counts.tolist() == pytest.approx([1 / 3, 1 / 3, 1 / 3, 0], abs=0.03)


def test_a_draw_depends_on_seed_prompt_and_position_alone():
    logits = torch.randn(50)
    first = drawn(logits)
    assert torch.equal(drawn(logits, prompts=PROMPTS.flip(0)).flip(0), first)
    for other in (
        drawn(logits, position=1),
        drawn(logits, seed=1),
        drawn(logits, prompts=PROMPTS + ROWS),
        drawn(logits, prompts=PROMPTS + (1 << 32)),
    ):
        assert (other != first).float().mean() > 0.5


def test_the_smallest_temperature_takes_the_most_probable_token():
    logits = 100 * torch.randn(50)  # so large that they over the smallest number are infinite
    for temperature in (1e-3, 1e-300, 3e-308):
        found = drawn(logits, temperature=temperature)
        assert bool((found == logits.argmax()).all())


def test_settings_outside_their_range_are_refused():
    with pytest.raises(ConfigError, match="temperature: expected 0 or more, got -1"):
        Sampling(temperature=-1.0)
    with pytest.raises(ConfigError, match="top_p: expected a number in"):
        Sampling(top_p=0.0)
