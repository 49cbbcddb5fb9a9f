"""Estimates of the divergence: against the exact one of small distributions, and the controller."""

import dataclasses
import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybridflow.rl import kl
from shared.errors import ConfigError, DataError

KINDS = ["k1", "abs", "k2", "k3", "k1+", "abs+", "k2+", "k3+"]


def pair(seed: int, vocab: int = 6):
    """Logits of a policy near a reference, and the reference's log-probabilities."""
    random = torch.Generator().manual_seed(seed)
    logits = torch.randn(vocab, generator=random, dtype=torch.float64)
    near = logits + 0.1 * torch.randn(vocab, generator=random, dtype=torch.float64)
    return logits.requires_grad_(), near.log_softmax(0)


@given(st.floats(-15, 15), st.floats(-15, 15))
def test_estimates_are_their_definitions(logp, ref):
    x = logp - ref
    defined = {
        "k1": x,
        "abs": abs(x),
        "k2": x * x / 2,
        "k3": min(10.0, math.exp(min(20, -x)) + max(-20, min(20, x)) - 1),
    }
    one, other = (torch.tensor([[v]], dtype=torch.float64) for v in (logp, ref))
    for kind in KINDS:
        found = kl.estimate(one, other, kind=kind)
        assert found.dtype == torch.float64
        assert found.item() == pytest.approx(defined[kind.rstrip("+")], rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("kind", ["k1", "k3", "k1+", "k3+"])
def test_k1_and_k3_are_the_divergence_in_expectation(kind):
    for seed in range(5):
        logits, ref = pair(seed)
        logp = logits.log_softmax(0).detach()
        exact = torch.nn.functional.kl_div(ref, logp, log_target=True, reduction="sum")
        found = kl.estimate(logp[None], ref[None], kind=kind)[0]
        torch.testing.assert_close((logp.exp() * found).sum(), exact)


@pytest.mark.parametrize("kind", KINDS)
def test_only_k2s_gradient_is_the_divergences(kind):
    """In expectation over sampled tokens, whose probabilities are no part of the graph."""
    logits, ref = pair(7)
    logp = logits.log_softmax(0)
    (exact,) = torch.autograd.grad((logp.exp() * (logp - ref)).sum(), logits, retain_graph=True)
    sampled = (logp.detach().exp() * kl.estimate(logp[None], ref[None], kind=kind)[0]).sum()
    (found,) = torch.autograd.grad(sampled, logits)
    assert torch.allclose(found, exact, atol=1e-12) == (kind == "k2" or kind.endswith("+"))


@pytest.mark.parametrize("of", [kl.k1, kl.k2, kl.k3, kl.absolute])
def test_gradients_are_those_of_the_values(of):
    random = torch.Generator().manual_seed(0)
    logp, ref = torch.randn(2, 3, 4, generator=random, dtype=torch.float64)
    logp.requires_grad_()
    assert torch.autograd.gradcheck(lambda x: of(x, ref), logp)


def test_k3_is_bounded_never_negative_and_keeps_small_digits():
    ref = torch.tensor([[0.0, 0.0, 0.0, 0.0, 0.0]])
    logp = torch.tensor([[-1000.0, -5.0, 0.0, 5.0, 1000.0]], requires_grad=True)
    found = kl.k3(logp, ref)
    torch.testing.assert_close(found, torch.tensor([[10.0, 10.0, 0.0, math.exp(-5) + 4, 10.0]]))
    found.sum().backward()
    assert logp.grad.isfinite().all()
    near = torch.randn(1, 100, generator=torch.Generator().manual_seed(0)) * 1e-2
    assert (kl.k3(near, torch.zeros(1, 100)) >= 0).all()
    tiny = kl.k3(torch.tensor([[1e-3]]), torch.tensor([[0.0]])).item()
    assert tiny == pytest.approx(5e-7, rel=1e-3)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", [torch.nan, -torch.inf])
def test_what_is_masked_never_shows(kind, bad):
    mask = torch.tensor([[True, False, True]])
    logp = torch.tensor([[-1.0, bad, -2.0]], requires_grad=True)
    ref = torch.tensor([[-1.5, bad, -1.0]])
    found = kl.estimate(logp, ref, mask, kind=kind)
    kl.sequence_mean(found, mask).backward()
    assert found[0, 1] == 0
    assert logp.grad[0, 1] == 0
    assert logp.grad.isfinite().all()


def test_an_unknown_estimate_is_refused():
    one = torch.zeros(1, 1)
    for kind in ("k4", "k3++", "", "+"):
        with pytest.raises(ConfigError, match="expected one of k1, abs, k2, k3"):
            kl.estimate(one, one, kind=kind)


def test_the_mean_is_over_sequences_of_their_means():
    values = torch.tensor([[1.0, 3.0, torch.nan], [5.0, 0.0, 0.0], [9.0, 9.0, 9.0]])
    mask = torch.tensor([[1.0, 1.0, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    assert kl.sequence_mean(values, mask).item() == (2 + 5) / 2


@given(st.floats(0, 100), st.integers(1, 1000))
def test_the_coefficient_moves_as_defined(measured, num_sequences):
    before = kl.AdaptiveKL(beta=0.2, target=6.0, horizon=10_000)
    after = before.update(torch.tensor(measured, dtype=torch.float64), num_sequences)
    error = max(-0.2, min(0.2, measured / 6.0 - 1))
    assert after.beta == pytest.approx(0.2 * (1 + error * num_sequences / 10_000))
    assert before.beta == 0.2
    assert (after.target, after.horizon) == (6.0, 10_000)


def test_the_coefficient_steers_towards_its_target():
    controller = kl.AdaptiveKL(beta=1.0, target=0.1, horizon=1000)
    for _ in range(500):  # a policy that goes where reward and penalty balance
        controller = controller.update(0.5 / (1 + controller.beta), 256)
    assert 0.5 / (1 + controller.beta) == pytest.approx(0.1, rel=0.01)


def test_the_controller_comes_back_from_its_state():
    controller = kl.AdaptiveKL(beta=0.2, target=6.0, horizon=10_000).update(9.0, 64)
    state = json.loads(json.dumps(controller.state_dict()))
    assert kl.AdaptiveKL.from_state_dict(state) == controller
    with pytest.raises(DataError, match="expected beta, target, horizon, got beta"):
        kl.AdaptiveKL.from_state_dict({"beta": 1.0})
    with pytest.raises(dataclasses.FrozenInstanceError):
        controller.beta = 1.0  # pyrefly: ignore [read-only]


@pytest.mark.parametrize("field", ["beta", "target", "horizon"])
@pytest.mark.parametrize("bad", [0.0, -1.0, math.inf, math.nan])
def test_bad_numbers_are_refused(field, bad):
    good = {"beta": 0.1, "target": 1.0, "horizon": 100.0}
    with pytest.raises(ConfigError, match=f"{field}: expected a positive"):
        kl.AdaptiveKL(**{**good, field: bad})
    with pytest.raises(DataError, match="got nan"):
        kl.AdaptiveKL(**good).update(math.nan, 1)
