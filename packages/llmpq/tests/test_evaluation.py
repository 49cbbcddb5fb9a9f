"""Measured divergence beside scipy's and torch's, and mixtures beside their targets."""

from unittest import mock

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr
from transformers import AutoConfig, AutoModelForCausalLM

from llmpq.evaluation import (
    check_noise,
    draw_mixtures,
    kl_divergence,
    plan_as_measured,
    rank_correlation,
)
from llmpq.planner.explanation import PlanResult
from llmpq.planner.plan import Plan, Stage
from llmpq.planner.problem import InfeasiblePlan
from llmpq.profiler.sensitivity import round_to_nearest, sensitivity
from shared.errors import ConfigError


def make(seed=0):
    torch.manual_seed(seed)
    config = AutoConfig.for_model(
        "llama", vocab_size=64, hidden_size=32, intermediate_size=80, num_hidden_layers=3,
        num_attention_heads=4,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config).eval()


IDS = torch.arange(24).view(2, 12)


def test_divergence_is_that_of_torch():
    first, second = make(0), make(1)
    with torch.no_grad():
        p, q = (model(IDS).logits.double().log_softmax(-1) for model in (second, first))
    expected = torch.nn.functional.kl_div(q, p, log_target=True, reduction="none").sum(-1).mean()
    assert kl_divergence(first, second, [IDS]) == pytest.approx(float(expected), rel=1e-4)
    assert kl_divergence(first, first, [IDS]) == 0.0


def test_mixtures_are_measured_as_rounded():
    model = make()
    noise = sensitivity(model, [IDS], bits=(3, 16), group_size=16).noise
    checks = check_noise(model, [IDS], noise, [(3, 16, 3), (16,) * 3], bits=(3, 16), group_size=16)
    assert checks[0].bits == (3, 16, 3)
    assert checks[0].predicted == pytest.approx(noise[0, 0] + noise[2, 0])
    assert (checks[1].predicted, checks[1].measured) == (0.0, 0.0)
    rounded = make()
    with round_to_nearest(rounded, (3, 16, 3), group_size=16):
        assert checks[0].measured == pytest.approx(kl_divergence(rounded, model, [IDS]))
    with pytest.raises(ConfigError, match=r"mixtures\[0\]: expected 3 widths of \[3, 16\]"):
        check_noise(model, [IDS], noise, [(4, 16, 16)], bits=(3, 16))


def test_mixtures_come_close_to_their_targets_from_below():
    noise = np.random.default_rng(0).random((20, 1)) * np.array([1.0, 0.2, 0.0])
    targets = [0.1, 1.0, 5.0, 1e9]
    mixtures = draw_mixtures(noise, targets, bits=(3, 4, 16), seed=1)
    for target, mixture in zip(targets, mixtures, strict=True):
        total = sum(noise[i, (3, 4, 16).index(width)] for i, width in enumerate(mixture))
        assert total <= target
        assert total >= 0.7 * min(target, noise[:, 0].sum())
    assert mixtures[-1] == (3,) * 20


def test_ranks_are_those_of_scipy():
    draws = np.random.default_rng(0)
    for _ in range(5):
        first, second = draws.integers(6, size=(2, 30)).tolist()
        assert rank_correlation(first, second) == pytest.approx(spearmanr(first, second)[0])
    with pytest.raises(ConfigError, match="at least two different values"):
        rank_correlation([1, 1], [1, 2])


def choose_most(noise, limit=1.0):
    """3 bits for as many layers as the limit allows, in order, and 16 for the others."""
    allowed = int((noise[:, 0].cumsum() <= limit).sum())
    plan = Plan(
        stages=(Stage(rank=0, layers=(0, len(noise))),),
        bits=(3,) * allowed + (16,) * (len(noise) - allowed),
        group_size=64, prefill_size=1, decode_size=1,
    )  # fmt: skip
    return mock.Mock(spec=PlanResult, plan=plan, nats=float(noise[:allowed, 0].sum()))


NOISE = np.array([[0.1, 0.0]] * 12)


def test_a_plan_keeps_its_limit_where_it_is_measured():
    asked = []

    def measure(plan):
        """More than the sum where layers are many."""
        asked.append(plan.bits.count(3))
        return (0.1 * asked[-1]) ** 2 + 0.05 * asked[-1]

    result, measured = plan_as_measured(choose_most, NOISE, 1.0, measure)
    assert asked == [10, 6]
    assert measured == pytest.approx(0.66)
    assert result.plan.bits.count(3) == 6
    assert result.nats == pytest.approx(0.9), "of the noise that was raised by 1.5"


def test_a_plan_that_keeps_its_limit_is_taken_as_it_is():
    result, measured = plan_as_measured(choose_most, NOISE, 1.0, lambda plan: 0.97)
    assert (result.plan.bits.count(3), measured) == (10, 0.97)
    assert result.nats == pytest.approx(1.0)


def test_a_loss_that_no_plan_brings_below_the_limit_is_told():
    told = r"at most 1 nats a token as measured, got 3, 3, 3, 3; allow more loss"
    with pytest.raises(InfeasiblePlan, match=told):
        plan_as_measured(choose_most, NOISE, 1.0, lambda plan: 3.0)
    with pytest.raises(InfeasiblePlan, match="got 3; allow"):
        plan_as_measured(choose_most, np.zeros((3, 2)), 1.0, lambda plan: 3.0)
