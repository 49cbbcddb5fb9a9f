"""Correction of the sampler's log-probabilities: definitions, bounds and the denominator."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybridflow.rl import correction, losses
from hybridflow.rl.aggregate import aggregate, denominator
from shared.errors import ConfigError


def some(seed: int, batch: int = 4, tokens: int = 6, spread: float = 0.7):
    random = torch.Generator().manual_seed(seed)
    rollout, apart = torch.randn(2, batch, tokens, generator=random, dtype=torch.float64)
    mask = torch.rand(batch, tokens, generator=random) < 0.7
    return rollout - 2 + spread * apart, rollout - 2, mask


def looped_ratio(old, rollout, mask, level):
    found = torch.zeros_like(old)
    for row, t in mask.nonzero().tolist():
        logs = [(old[row, u] - rollout[row, u]).item() for u in mask[row].nonzero()[:, 0].tolist()]
        log = (old[row, t] - rollout[row, t]).item() if level == "token" else sum(logs)
        found[row, t] = math.exp(max(-20.0, min(20.0, log)))
    return found


@pytest.mark.parametrize("level", ["token", "sequence"])
@given(seed=st.integers(0, 10**6), spread=st.sampled_from([0.1, 1.0, 30.0]), cap=st.floats(0.5, 5))
def test_weights_and_rejection_are_their_definitions(level, seed, spread, cap):
    old, rollout, mask = some(seed, 3, 4, spread)
    ratio = looped_ratio(old, rollout, mask, level)
    found = correction.weights(old, rollout, mask, level=level, cap=cap)
    torch.testing.assert_close(found, ratio.clamp(max=cap))
    kept = correction.keep(old, rollout, mask, level=level, bounds=(0.5, cap))
    assert torch.equal(kept, mask & (ratio >= 0.5) & (ratio <= cap))


def test_equal_policies_are_left_alone():
    old, _, mask = some(0)
    for level in ("token", "sequence"):
        assert torch.equal(correction.weights(old, old, mask, level=level), mask.double())
        assert torch.equal(correction.keep(old, old, mask, level=level), mask)
    found = correction.mismatch(old, old, mask)
    zeros = {"k1": 0, "k3": 0, "absolute": 0}
    count = int(mask.sum())
    assert {n: x.item() for n, x in found.items()} == {
        "tokens": count,
        **zeros,
        "square_ratio": count,
    }


def test_a_sequence_is_kept_or_rejected_as_one():
    old, rollout, mask = some(1, 20, 5)
    kept = correction.keep(old, rollout, mask.double(), level="sequence", bounds=(0.8, 1.25))
    assert kept.any()
    assert not kept[mask].all()
    assert all(torch.equal(k, m) or not k.any() for k, m in zip(kept, mask, strict=True))


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_masked_never_shows(level, bad):
    old, rollout, mask = some(2)
    dirty, away = torch.where(mask, old, bad), torch.where(mask, rollout, bad)
    for of in (correction.weights, correction.keep):
        assert torch.equal(of(dirty, away, mask, level=level), of(old, rollout, mask, level=level))
    assert correction.mismatch(dirty, away, mask) == correction.mismatch(old, rollout, mask)


def test_what_the_sampler_could_not_have_drawn_is_bounded_and_rejected():
    old = torch.tensor([[-1.0, -math.inf, -1.0, math.nan]])
    rollout = torch.tensor([[-1.0, -1.0, -math.inf, -1.0]])
    mask = torch.ones(1, 4)
    found = correction.weights(old, rollout, mask, cap=3.0)[0]
    torch.testing.assert_close(found[:3], torch.tensor([1.0, math.exp(-20), 3.0]))
    unbounded = correction.weights(old, rollout, mask, cap=math.inf)[0, 2]
    assert unbounded.item() == pytest.approx(math.exp(20), rel=1e-6)
    assert correction.keep(old, rollout, mask).tolist() == [[True, False, False, False]]


def test_weights_make_the_samplers_mean_the_trainers():
    """Exactly, over a whole vocabulary weighted by the sampler's probabilities."""
    random = torch.Generator().manual_seed(0)
    rollout, old = torch.randn(2, 1, 8, generator=random, dtype=torch.float64).log_softmax(-1)
    worth = torch.randn(8, generator=random, dtype=torch.float64)
    found = correction.weights(old, rollout, torch.ones(1, 8), cap=1e9)[0]
    torch.testing.assert_close(
        (rollout[0].exp() * found * worth).sum(), (old[0].exp() * worth).sum()
    )


def test_rejection_leaves_the_weight_of_the_rest():
    """A loss of kept tokens over the denominator from before rejection."""
    old, rollout, mask = some(3)
    scale = torch.ones_like(old)
    kept = correction.keep(old, rollout, mask, bounds=(0.7, 1.4))
    assert 0 < int(kept.sum()) < int(mask.sum())
    loss = losses.reinforce(old, old, scale, kept)
    for mode in ("token-mean", "seq-mean-token-mean"):
        found = aggregate(loss, mask, mode, denominator(mask, mode))
        alone = torch.where(kept, -old, 0)
        if mode == "token-mean":
            defined = alone.sum() / mask.sum()
        else:
            defined = (alone.sum(1) / mask.sum(1).clamp(min=1)).sum() / mask.any(1).sum()
        torch.testing.assert_close(found, defined)


@given(st.integers(0, 10**6), st.integers(0, 4))
def test_the_mismatch_adds_up(seed, cut):
    old, rollout, mask = some(seed)
    found = correction.mismatch(old, rollout, mask)
    logs = (rollout - old)[mask]
    defined = {
        "tokens": mask.sum().double(),
        "k1": logs.sum(),
        "k3": (torch.exp(-logs) - 1 + logs).clamp(max=10).sum(),
        "absolute": logs.abs().sum(),
        "square_ratio": torch.exp(-2 * logs).sum(),
    }
    torch.testing.assert_close(found, defined)
    parts = [
        correction.mismatch(old[part], rollout[part], mask[part])
        for part in (slice(0, cut), slice(cut, None))
    ]
    torch.testing.assert_close({name: parts[0][name] + parts[1][name] for name in found}, found)


def test_nothing_of_it_has_a_gradient_and_types_stay():
    old, rollout, mask = some(4)
    old = old.float().requires_grad_()
    found = correction.weights(old, rollout.float(), mask)
    assert not found.requires_grad
    assert found.dtype == torch.float32
    assert not correction.mismatch(old, rollout.float(), mask)["k3"].requires_grad


def test_what_cannot_be_is_refused():
    batch = some(0)
    for of in (correction.weights, correction.keep):
        with pytest.raises(ConfigError, match="expected one of token, sequence, got 'word'"):
            of(*batch, level="word")
    with pytest.raises(ConfigError, match="cap: expected a positive"):
        correction.weights(*batch, cap=0)
    with pytest.raises(ConfigError, match="bounds: expected 0 <= low <= high"):
        correction.keep(*batch, bounds=(2.0, 0.5))
