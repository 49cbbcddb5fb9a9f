"""Losses of tokens: against scalar definitions, their gradients, and what is masked."""

import functools
import math
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybridflow.rl import losses
from hybridflow.rl.aggregate import aggregate
from shared.errors import ConfigError

POLICY = {
    "ppo": losses.ppo,
    "ppo, no dual clip": functools.partial(losses.ppo, clip=(0.2, 0.28), dual_clip=None),
    "gspo": functools.partial(losses.gspo, clip=(0.1, 0.2)),
    "cispo": losses.cispo,
    "reinforce": losses.reinforce,
}


def some(seed: int, batch: int = 4, tokens: int = 6, spread: float = 0.6):
    """Log-probabilities, now and then, advantages and a mask with holes."""
    random = torch.Generator().manual_seed(seed)
    old, step, scale = torch.randn(3, batch, tokens, generator=random, dtype=torch.float64)
    mask = torch.rand(batch, tokens, generator=random) < 0.7
    return old - 2 + spread * step, old - 2, scale, mask


def scalar_ppo(logp, old, advantage, low, high, dual):
    ratio = math.exp(max(-20, min(20, logp - old)))
    clipped = max(1 - low, min(1 + high, ratio))
    loss = max(-ratio * advantage, -clipped * advantage)
    return min(loss, -dual * advantage) if advantage < 0 and dual is not None else loss


@given(
    st.floats(-30, 0),
    st.floats(-30, 0),
    st.floats(-5, 5),
    st.floats(0, 1),
    st.floats(0, 5),
    st.sampled_from([None, 1.1, 3.0]),
)
def test_ppo_is_its_definition(logp, old, advantage, low, high, dual):
    now, then, scale = torch.tensor([logp, old, advantage], dtype=torch.float64).view(3, 1, 1)
    found = losses.ppo(now, then, scale, torch.ones(1, 1), clip=(low, high), dual_clip=dual)
    assert found.item() == pytest.approx(
        scalar_ppo(logp, old, advantage, low, high, dual), rel=1e-9, abs=1e-12
    )


@pytest.mark.parametrize(
    ("advantage", "ratio", "has_gradient"),
    [
        (1, 1.1, True),
        (1, 1.3, False),
        (1, 0.5, True),
        (-1, 0.9, True),
        (-1, 0.5, False),
        (-1, 2.0, True),
        (-1, 4.0, False),
    ],
)
def test_where_ppos_gradient_ends(advantage, ratio, has_gradient):
    logp = torch.tensor([[math.log(ratio)]], dtype=torch.float64, requires_grad=True)
    old, scale, mask = torch.zeros(3, 1, 1, dtype=torch.float64)
    losses.ppo(logp, old, scale + advantage, mask + 1, clip=(0.2, 0.2)).sum().backward()
    assert logp.grad.item() == pytest.approx(-advantage * ratio if has_gradient else 0)


def test_on_policy_every_loss_has_the_gradient_of_reinforce():
    _, old, scale, mask = some(0)
    for name, loss in POLICY.items():
        logp = old.clone().requires_grad_()
        loss(logp, old, scale, mask).sum().backward()
        torch.testing.assert_close(logp.grad, -scale * mask, msg=name)


@pytest.mark.parametrize("name", ["ppo", "ppo, no dual clip", "reinforce"])
def test_gradients_are_those_of_the_values(name):
    """The others hold a ratio constant: their gradients are compared with what they are to be."""
    logp, old, scale, mask = some(1)
    logp.requires_grad_()
    assert torch.autograd.gradcheck(lambda x: POLICY[name](x, old, scale, mask), logp)


@pytest.mark.parametrize("clip", [(0.1, 0.2), (10.0, 10.0)])
def test_gspo_has_the_value_and_gradient_of_the_sequences_ratio(clip):
    """The objective of whole sequences, written out and differentiated as it stands."""
    logp, old, scale, mask = some(2, batch=8)
    mask[:, 0] = True  # no sequence is empty
    scale = scale[:, :1].expand(-1, 6)
    ours, defined = logp.clone().requires_grad_(), logp.clone().requires_grad_()
    loss = losses.gspo(ours, old, scale, mask, clip)
    mean = torch.stack([(defined - old)[row, mask[row]].mean() for row in range(8)])
    ratio = mean.exp()
    whole = torch.maximum(
        -ratio * scale[:, 0], -ratio.clamp(1 - clip[0], 1 + clip[1]) * scale[:, 0]
    )
    value = aggregate(loss, mask, "seq-mean-token-mean")
    torch.testing.assert_close(value, whole.mean())
    value.backward()
    whole.mean().backward()
    torch.testing.assert_close(ours.grad, defined.grad)


def test_gspos_ratio_is_at_most_e_to_the_10():
    logp, old, scale, mask = torch.tensor([15.0, 0.0, -1.0, 1.0]).view(4, 1, 1)
    logp.requires_grad_()
    found = losses.gspo(logp, old, scale, mask)
    found.sum().backward()
    assert found.item() == pytest.approx(math.exp(10), rel=1e-6)
    assert logp.grad.item() == 0


def test_cispo_weighs_reinforce_by_a_bounded_constant():
    logp, old, scale, mask = some(3)
    logp.requires_grad_()
    loss = losses.cispo(logp, old, scale, mask, (1.0, 0.5))
    loss.sum().backward()
    weight = (logp - old).exp().clamp(0, 1.5).detach()
    torch.testing.assert_close(loss, losses.reinforce(logp, old, scale, mask) * weight)
    torch.testing.assert_close(logp.grad, -weight * scale * mask)


@given(
    st.floats(-5, 5),
    st.floats(-5, 5),
    st.floats(-5, 5),
    st.sampled_from([None, 0.0, 0.2, 2.0]),
)
def test_the_critics_loss_is_its_definition(now, old, target, clip):
    values, then, returns = torch.tensor([now, old, target], dtype=torch.float64).view(3, 1, 1)
    found = losses.value(values, then, returns, torch.ones(1, 1), clip)
    defined = (now - target) ** 2 / 2
    if clip is not None:
        near = max(old - clip, min(old + clip, now))
        defined = max(defined, (near - target) ** 2 / 2)
    assert found.item() == pytest.approx(defined, abs=1e-12)


def test_the_critics_gradient_is_that_of_its_loss():
    values, old, returns, mask = some(4)
    values.requires_grad_()
    for clip in (None, 0.3):
        assert torch.autograd.gradcheck(
            lambda x, clip=clip: losses.value(x, old, returns, mask, clip), values
        )


@pytest.mark.parametrize("name", POLICY)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_masked_never_shows(name, bad):
    logp, old, scale, mask = some(5)
    clean = POLICY[name](logp, old, scale, mask)
    dirty, then, worth = (torch.where(mask, x, bad) for x in (logp, old, scale))
    dirty.requires_grad_()
    found = POLICY[name](dirty, then, worth, mask.double())
    aggregate(found, mask, "token-mean").backward()
    assert torch.equal(found, clean)
    assert (found[~mask] == 0).all()
    assert (dirty.grad[~mask] == 0).all()
    assert dirty.grad.isfinite().all()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_masked_never_shows_to_the_critic(bad):
    values, old, returns, mask = some(6)
    clean = losses.value(values, old, returns, mask)
    dirty, then, target = (torch.where(mask, x, bad) for x in (values, old, returns))
    dirty.requires_grad_()
    found = losses.value(dirty, then, target, mask)
    found.sum().backward()
    assert torch.equal(found, clean)
    assert dirty.grad.isfinite().all()


@pytest.mark.parametrize("name", ["ppo", "gspo", "cispo"])
@pytest.mark.parametrize("side", [1, -1])
def test_a_ratio_out_of_all_bounds_stays_finite(name, side):
    old = torch.zeros(1, 3)
    # CISPO's value is a multiple of the log-probability itself.
    far = 1e6 if name == "cispo" else math.inf
    logp = torch.tensor([[side * far, side * 1e5, 0.0]], requires_grad=True)
    for scale in (1.0, -1.0):
        found = POLICY[name](logp, old, torch.full((1, 3), scale), torch.ones(1, 3))
        (grad,) = torch.autograd.grad(found.sum(), logp)
        assert found.isfinite().all()
        assert grad.isfinite().all()


@pytest.mark.parametrize("name", POLICY)
def test_rows_may_move_and_padding_may_grow(name):
    logp, old, scale, mask = some(7)
    loss = POLICY[name]
    found = loss(logp, old, scale, mask)
    order = torch.tensor([2, 0, 3, 1])
    assert torch.equal(loss(logp[order], old[order], scale[order], mask[order]), found[order])
    now, then, worth = torch.nn.functional.pad(torch.stack([logp, old, scale]), (0, 3), value=9.0)
    padded = loss(now, then, worth, torch.nn.functional.pad(mask, (0, 3)))
    torch.testing.assert_close(padded[:, :6], found)
    assert (padded[:, 6:] == 0).all()


@pytest.mark.parametrize("name", POLICY)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_types_stay(name, dtype):
    logp, old, scale, mask = some(8)
    found = POLICY[name](logp.to(dtype), old.to(dtype), scale.to(dtype), mask)
    assert found.dtype == dtype


@pytest.mark.parametrize("name", POLICY)
def test_a_loss_travels_to_another_process(name):
    logp, old, scale, mask = some(9)
    again = pickle.loads(pickle.dumps(POLICY[name]))
    assert torch.equal(again(logp, old, scale, mask), POLICY[name](logp, old, scale, mask))


@given(st.integers(0, 10**6), st.integers(0, 4), st.sampled_from([None, 2.0]))
def test_diagnostics_are_counts_and_add_up(seed, cut, dual):
    logp, old, scale, mask = some(seed)
    found = losses.diagnostics(logp, old, scale, mask, (0.2, 0.3), dual)
    rows = zip(logp[mask].tolist(), old[mask].tolist(), scale[mask].tolist(), strict=True)
    defined = dict.fromkeys(found, 0.0)
    for now, then, advantage in rows:
        ratio = math.exp(now - then)
        defined["tokens"] += 1
        defined["clipped"] += ratio > 1.3 if advantage > 0 else ratio < 0.8
        defined["dual_clipped"] += advantage < 0 and ratio > (dual or math.inf)
        defined["ratio"] += ratio
        defined["k1"] += then - now
        defined["k3"] += ratio - 1 - (now - then)
    assert {name: x.item() for name, x in found.items()} == pytest.approx(defined)
    parts = [
        losses.diagnostics(logp[part], old[part], scale[part], mask[part], (0.2, 0.3), dual)
        for part in (slice(0, cut), slice(cut, None))
    ]
    for name, total in found.items():
        torch.testing.assert_close(parts[0][name] + parts[1][name], total)


def test_what_cannot_be_is_refused():
    batch = some(0)
    for loss in (losses.ppo, losses.gspo, losses.cispo, losses.diagnostics):
        for clip in ((-0.1, 0.2), (0.2, math.nan)):
            with pytest.raises(ConfigError, match="clip: expected a low and a high"):
                loss(*batch, clip=clip)
    with pytest.raises(ConfigError, match="dual_clip: expected a ratio above 1"):
        losses.ppo(*batch, dual_clip=1.0)
    with pytest.raises(ConfigError, match="clip: expected a distance"):
        losses.value(*batch, clip=-1.0)
