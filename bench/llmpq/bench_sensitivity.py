"""Sensitivity beside measured divergence on SmolLM2-135M-Instruct, groups of 64.

Each of 30 layers is rounded alone at 3 and 4 bits, and the divergence of next-token distributions is
measured on other text; noise from few tokens is to order the layers alike. Measured orders have noise
of their own: three texts of 768 tokens are measured, and how well one orders the layers as the two
others do is told beside each figure. Twelve mixtures of widths,
of 0.01 to 0.5 nats, are predicted by adding up noise. GPTQ is compared with rounding to nearest. The
model's weights lie on 4-bit grids of 32 columns, so groups of 64 are used. Text is the American
Standard Version: calibration and measuring use other passages of 96 tokens, drawn from all over it, as
prompts of one kind are; GPTQ uses chapters before these.
"""

import time
from typing import Any

import numpy as np
import pytest
import torch

from llmpq.data import paragraphs, smollm2
from llmpq.evaluation import check_noise, draw_mixtures, rank_correlation
from llmpq.profiler.sensitivity import (
    divergence,
    predict,
    read_batches,
    round_to_nearest,
    sensitivity,
)
from llmpq.runtime.gptq import find_matrices, fit_ranges, round_model
from shared.claims import Claim
from shared.kernels import weight_matmul

REVISION = 2
GROUP_SIZE = 64
SEEDS = 5
TOKENS, LENGTH = 1536, 96
_PASSAGES_FROM = 96 * 128
"""Tokens before it are GPTQ's."""
PEERS = [
    {
        "peer": "variance of LLM-PQ",
        "setting": "step^2 of a matrix's whole range times the variance of its inputs, summed over a "
        "layer's matrices, on the same text",
        "why": "the form that the published code computes",
    },
    {
        "peer": "layer number, random",
        "setting": "the layer's place; 1,000 random orders, the mean of their absolute correlations",
        "why": "controls: what an order that knows nothing of weights gives",
    },
    {
        "peer": "rounding to nearest",
        "setting": "asymmetric groups of 64, range of the group, float16 scales",
        "why": "the same codes, kernels and bytes as GPTQ's",
    },
]


@pytest.fixture(scope="module")
def smol():
    transformers = pytest.importorskip("transformers")
    folder = smollm2()
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ids = torch.tensor(tokenizer(" ".join(paragraphs(1200)))["input_ids"])
    return model, ids


def passages(ids, first, num_passages):
    """Passages of 96 tokens from all over the text, no two of them the same by number."""
    blocks = ids[_PASSAGES_FROM : len(ids) // LENGTH * LENGTH].view(-1, LENGTH)
    order = torch.randperm(len(blocks), generator=torch.Generator().manual_seed(0))
    return blocks[order[first : first + num_passages]]


@pytest.fixture(scope="module")
def measured_texts(smol):
    """Three texts of 768 tokens."""
    _, ids = smol
    return [[passages(ids, 8 * number, 8)] for number in range(3)]


@pytest.fixture(scope="module")
def measured_text(measured_texts):
    return measured_texts[0]


def calibration(ids, seed):
    """As many tokens as the package takes by default, other passages for each seed."""
    count = TOKENS // LENGTH
    return [passages(ids, 24 + count * seed, count)]


def bench_order_of_layers(smol, measured_texts, benchmark, record_claim):
    model, ids = smol
    settings = {"bits": (3, 4), "group_size": GROUP_SIZE}
    noise, variance, seconds = [], [], []

    def measure():
        for seed in range(SEEDS):
            begun = time.perf_counter()
            noise.append(sensitivity(model, calibration(ids, seed), seed=seed, **settings).noise)
            seconds.append(time.perf_counter() - begun)
            variance.append(
                sensitivity(model, calibration(ids, seed), method="variance", **settings).noise
            )
        return np.stack(
            [sensitivity(model, text, method="kl", **settings).noise for text in measured_texts]
        )

    texts = benchmark.pedantic(measure, rounds=1)
    measured = texts.mean(axis=0)
    draws = np.random.default_rng(0)
    for column, width in enumerate((3, 4)):
        truth = measured[:, column]
        ours = [rank_correlation(found[:, column], truth) for found in noise]
        control = [rank_correlation(found[:, column], truth) for found in variance]
        between = [
            rank_correlation(
                texts[one, :, column], np.delete(texts, one, axis=0).mean(0)[:, column]
            )
            for one in range(len(texts))
        ]
        number = rank_correlation(np.arange(len(truth)), truth)
        chance = np.mean([abs(rank_correlation(draws.permutation(30), truth)) for _ in range(1000)])
        total = [float(found[:, column].sum() / truth.sum()) for found in noise]
        known = [*(abs(one) for one in control), abs(number), float(chance)]
        detail = (
            f"groups of {GROUP_SIZE}, {SEEDS} texts of {TOKENS} tokens, "
            f"{np.median(seconds):.0f} s for all widths; range {min(ours):.2f} to {max(ours):.2f}; "
            f"variance {np.median(control):.2f}, layer number {number:.2f}, random {chance:.2f}; sum "
            f"of noise over sum of KL {min(total):.2f} to {max(total):.2f}; KL on {len(texts)} x 768 "
            f"other tokens, each text against the two others {min(between):.2f} to {max(between):.2f}"
        )
        right = bool((truth > 0).all()) and all((found > 0).all() for found in noise)
        for baseline, of, aim in (
            (0.85, "the aim", 1.0),
            (max(known), "best of variance, layer number and random, by size", None),
        ):
            record_claim(
                Claim(
                    name=f"order of 30 layers by noise against measured KL, SmolLM2, {width} bits",
                    unit="Spearman",
                    ours=float(np.median(ours)),
                    baseline=baseline,
                    baseline_name=of,
                    higher_is_better=True,
                    correct=right,
                    detail=detail,
                    source="hatch run bench llmpq -k sensitivity",
                ),
                aim=aim,
                spread=(min(ours) / baseline, max(ours) / baseline),
            )


def bench_mixed_plans(smol, measured_texts, benchmark, record_claim):
    model, ids = smol
    settings: dict[str, Any] = {"bits": (3, 4, 8, 16), "group_size": GROUP_SIZE}

    def measure():
        noise = sensitivity(model, calibration(ids, 0), **settings).noise
        mixtures = draw_mixtures(
            noise, np.geomspace(0.013, 0.5, 12).tolist(), bits=settings["bits"]
        )
        texts = [text for (text,) in measured_texts]
        return check_noise(model, texts, noise, mixtures, **settings)

    checks = benchmark.pedantic(measure, rounds=1)
    predicted = [check.predicted for check in checks]
    measured = [check.measured for check in checks]
    off = [max(a / b, b / a) for a, b in zip(predicted, measured, strict=True)]
    record_claim(
        Claim(
            name="KL of 12 mixed plans: predicted against measured, SmolLM2",
            unit="x, the worst of 12",
            ours=max(off),
            baseline=1.5,
            baseline_name="the aim",
            higher_is_better=False,
            correct=rank_correlation(predicted, measured) >= 0.95 and min(measured) > 0,
            detail=f"groups of {GROUP_SIZE}, widths 3, 4, 8 and 16; predicted {min(predicted):.3f} to "
            f"{max(predicted):.3f} nats; Spearman {rank_correlation(predicted, measured):.2f}; "
            f"median {np.median(off):.2f}x; KL on 3 x 768 tokens",
            source="hatch run bench llmpq -k sensitivity",
        ),
        aim=1.0,
    )


@torch.no_grad()
def input_moments(model, text):
    """Mean square of each input of each matrix that is rounded."""
    sums: dict[torch.nn.Linear, torch.Tensor] = {}

    def note(module, inputs):
        sums[module] = sums.get(module, torch.zeros(())) + inputs[0].square().flatten(0, -2).sum(0)

    hooks = [
        module.register_forward_pre_hook(note) for layer in find_matrices(model) for module in layer
    ]
    for batch in text:
        model(input_ids=batch)
    for hook in hooks:
        hook.remove()
    num_tokens = sum(batch.numel() for batch in text)
    return {module: total / num_tokens for module, total in sums.items()}


def bench_gptq(smol, measured_text, benchmark, record_claim):
    model, ids = smol
    found = read_batches(measured_text)
    expected = predict(model, found)
    kept = {name: value.clone() for name, value in model.state_dict().items()}
    text = list(ids[8000 : 8000 + 32 * 128].view(32, 128).split(8))

    def measure():
        with round_to_nearest(model, [3] * 30, group_size=GROUP_SIZE):
            nearest = divergence(model, found, expected)
        try:
            moments = input_moments(model, text)
            for module, moment in moments.items():
                packed = fit_ranges(module.weight, moment, 3, group_size=GROUP_SIZE)
                module.weight.data = weight_matmul.unpack(packed)
            fitted = divergence(model, found, expected)
            model.load_state_dict(kept)
            begun = time.perf_counter()
            packed = round_model(model, text, [3] * 30, group_size=GROUP_SIZE)
            seconds = time.perf_counter() - begun
            return nearest, fitted, divergence(model, found, expected), len(packed), seconds
        finally:
            model.load_state_dict(kept)

    nearest, fitted, ours, num_matrices, seconds = benchmark.pedantic(measure, rounds=1)
    record_claim(
        Claim(
            name="KL of SmolLM2 at 3 bits: GPTQ against rounding to nearest",
            unit="nats a token",
            ours=ours,
            baseline=nearest,
            baseline_name="rounding to nearest",
            higher_is_better=False,
            correct=num_matrices == 7 * 30 and ours > 0,
            detail=f"groups of {GROUP_SIZE}, 4,096 tokens of calibration, {seconds:.0f} s; control: "
            f"nearest over ranges fitted to the same inputs, without GPTQ, {fitted:.3f} nats",
            source="hatch run bench llmpq -k sensitivity",
        ),
        aim=1 / 0.6,
    )
