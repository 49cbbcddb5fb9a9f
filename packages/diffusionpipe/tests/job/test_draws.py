import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import diffusionpipe as dp
from diffusionpipe.job.draws import decide
from shared.errors import ConfigError


@settings(max_examples=30)
@given(st.integers(1, 20), st.data())
def test_any_division_of_a_batch_draws_the_same(rows, data):
    whole = dp.Draw(3, 5, range(rows))
    cut = data.draw(st.integers(0, rows))
    parts = [dp.Draw(3, 5, piece) for piece in (range(cut), range(cut, rows)) if piece]
    for draw_rows in (
        lambda draw: draw.normal((2, 3)),
        lambda draw: draw.uniform((4,)),
        lambda draw: draw.integers(0, 1000),
    ):
        assert torch.equal(torch.cat([draw_rows(part) for part in parts]), draw_rows(whole))


def test_seeds_steps_samples_and_names_are_independent():
    rows = torch.cat(
        [
            dp.Draw(seed, step, range(3)).normal((64,), name)
            for seed in (0, 1)
            for step in (0, 1)
            for name in ("noise", "latents")
        ]
    )
    assert len(torch.unique(rows, dim=0)) == len(rows) == 24
    products = rows @ rows.T / 64
    off_diagonal = products - torch.diag(products.diag())
    assert off_diagonal.abs().max() < 0.6


def test_order_and_number_of_draws_change_nothing():
    draw = dp.Draw(0, 0, range(2))
    first = draw.normal((3,))
    draw.integers(0, 10)
    draw.uniform()
    assert torch.equal(draw.normal((3,)), first)
    torch.manual_seed(5)
    state = torch.random.get_rng_state()
    draw.normal((3,))
    assert torch.equal(torch.random.get_rng_state(), state)


def test_draws_are_distributed_as_they_say():
    draw = dp.Draw(1, 0, range(4000))
    normal = draw.normal()
    assert abs(normal.mean()) < 0.06
    assert abs(normal.std() - 1) < 0.05
    uniform = draw.uniform()
    assert 0 <= uniform.min() <= uniform.max() < 1
    assert abs(uniform.mean() - 0.5) < 0.02
    counts = torch.bincount(draw.integers(2, 7), minlength=7)
    assert counts[:2].sum() == 0
    assert counts[2:].min() > 650


def test_types_and_shapes_follow_a_tensor():
    like = torch.zeros(1, dtype=torch.float64)
    drawn = dp.Draw(0, 0, range(3)).normal((2,), like=like)
    assert drawn.dtype == torch.float64
    assert drawn.shape == (3, 2)


def test_no_samples_are_refused():
    with pytest.raises(ConfigError, match="expected at least one sample, got range"):
        dp.Draw(0, 0, range(0)).normal()


def test_decisions_happen_as_often_as_asked():
    happened = [decide(0, step, 0.3) for step in range(2000)]
    assert abs(sum(happened) / 2000 - 0.3) < 0.04
    assert happened == [decide(0, step, 0.3) for step in range(2000)]
    assert all(decide(0, step, 1.0) for step in range(20))
    assert not any(decide(0, step, 0.0) for step in range(20))
