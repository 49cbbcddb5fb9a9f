"""Measured divergence beside scipy's and torch's, and mixtures beside their targets."""

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr
from transformers import AutoConfig, AutoModelForCausalLM

from llmpq.evaluation import check_noise, draw_mixtures, kl_divergence, rank_correlation
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
