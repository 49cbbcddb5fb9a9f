"""The noise that the probe predicts beside the error of the gradient when operators are lowered one at a time.

MiniLM on books of the Bible, ResNet-8 on digits, and a Llama with random weights, without dropout. Rounding to
nearest draws nothing, so that every batch counts as one draw: each operator is lowered alone on batch after
batch until the standard error is small, and the probe reads the first two of them. "exact" and "paper" weigh
an operator's own variance by its depth; the others are the variance of its weight alone, its size, and the
trace of the Hessian times the weight's squared error, as HAWQ-V2 has it.
"""

import sys
import time
from pathlib import Path
from statistics import median

import pytest
import torch
from scipy.stats import spearmanr
from torch.nn.attention import SDPBackend, sdpa_kernel

import qsync
from qsync.profiler.gradients import find_gradient, measure_noise, sum_squares
from qsync.profiler.state import in_float32, preserve_state
from qsync.runtime.modules import list_operators, set_precision
from shared.claims import Claim

# What lies beside a benchmark is no module of a package.
sys.path.insert(0, str(Path(__file__).parent))

from indicators import rank_by_variance
from real_models import MODELS, build_job, draw_precisions

PEERS = [
    {
        "peer": "paper",
        "setting": "QSync's variance of products, forward weighed 4 to 1 against backward, by depth in the "
        "traced graph; activations and gradients of the same two batches",
        "why": "the published indicator with the published code's weight",
    },
    {
        "peer": "Hessian trace",
        "setting": "Hutchinson's estimate with 16 sign vectors on the same two batches, the mean of a weight's "
        "diagonal times its squared error, as HAWQ-V2 and HAWQ-V3 rank layers",
        "why": "more vectors change no rank",
    },
]
PRECISIONS = ("bf16", "int8")
TOKENS = {"MiniLM": 256, "ResNet-8": 256, "Llama": 256}
FEWEST, MOST = 6, 40
"""Batches on which each operator is lowered alone."""
LARGEST_ERROR = 0.05
"""Standard error of a measured noise, relative."""
NUM_PLANS, MOST_NOISE, PLAN_BATCHES, SECONDS = 20, 0.3, 4, 100.0
COMMAND = "hatch run bench qsync/indicator"


def measure_alone(job, precisions):
    """Squared errors of the gradient [operator, precision] by batch, and its squared norms by batch.

    Every operator gets as many batches, all on the same ones.
    """
    operators = list_operators(job.model)
    errors, norms = [], []
    began = time.perf_counter()
    with in_float32(job.model), sdpa_kernel(SDPBackend.MATH):
        for batch in job.batches:
            with preserve_state(job.model):
                exact = find_gradient(job.model, batch, job.loss_fn)
            row = []
            for module in operators.values():
                for precision in precisions:
                    set_precision(module, precision)
                    with preserve_state(job.model):
                        lowered = find_gradient(job.model, batch, job.loss_fn)
                    set_precision(module, "fp32")
                    row.append(sum_squares(a - b for a, b in zip(exact, lowered, strict=True)))
            errors.append(row)
            norms.append(sum_squares(exact))
            if len(norms) >= FEWEST:
                noise, relative = average(errors, norms)
                if float(relative.max()) <= LARGEST_ERROR:
                    break
                if time.perf_counter() - began > SECONDS:
                    break
    shape = (len(operators), len(precisions))
    return noise.view(shape), relative.view(shape), len(norms)


def average(errors, norms):
    """The ratio of the sums over batches, and its relative standard error."""
    error = torch.tensor(errors, dtype=torch.float64)
    norm = torch.tensor(norms, dtype=torch.float64)
    noise = error.sum(0) / norm.sum()
    residual = error - noise * norm[:, None]
    count = len(norms)
    spread = (count / (count - 1) * residual.square().sum(0)).sqrt() / norm.sum()
    return noise, spread / noise


@pytest.mark.parametrize("name", MODELS)
def bench_alone(benchmark, record_claim, name):
    """Ranks, sum and cost of the probe beside the measured noise of single operators."""
    torch.set_num_threads(1)
    job = build_job(name, num_batches=MOST, tokens=TOKENS[name])

    def run():
        began = time.perf_counter()
        probed = qsync.sensitivity(
            job.model, job.batches, job.loss_fn, precisions=("fp32", *PRECISIONS)
        )
        return probed, time.perf_counter() - began

    step_s = time_step(job)
    probed, took_s = benchmark.pedantic(run, rounds=1)
    step_s = median([*step_s, *time_step(job)])
    measured, relative, count = measure_alone(job, PRECISIONS)
    others = rank_by_variance(job, PRECISIONS)
    ours = torch.tensor([[row[p] for p in PRECISIONS] for row in probed.noise.values()])
    is_right = bool((measured > 0).all())
    told = (
        f"{len(ours)} operators on {count} batches of {TOKENS[name]} tokens, standard error of the measured at most "
        f"{float(relative.max()):.1%}, in the median {float(relative.median()):.1%}; noises by {probed.method}"
    )
    for k, precision in enumerate(PRECISIONS):
        rank = {
            each: spearmanr(table[:, k], measured[:, k]).statistic for each, table in others.items()
        }
        own = spearmanr(ours[:, k], measured[:, k]).statistic
        ratios = ours[:, k] / measured[:, k]
        total = float(ours[:, k].sum() / measured[:, k].sum())
        detail = (
            f"{told}; single operators {float(ratios.min()):.2f} to {float(ratios.max()):.2f} of the measured; "
            "others' correlations: "
            + ", ".join(f"{each} {value:.2f}" for each, value in rank.items())
        )
        where = f"{name}, {precision}"
        command = f'{COMMAND} -k "alone and {name}"'
        record_claim(
            Claim(
                name=f"rank correlation with the measured noise, {where}",
                unit="Spearman",
                ours=own,
                baseline=0.9,
                baseline_name="the aim",
                higher_is_better=True,
                correct=is_right,
                detail=detail,
                source=command,
            ),
            aim=1.0,
        )
        for each, value in rank.items():
            record_claim(
                Claim(
                    name=f"missing rank correlation, {where}",
                    unit="1 - Spearman",
                    ours=1 - own,
                    baseline=1 - value,
                    baseline_name=each,
                    higher_is_better=False,
                    correct=is_right,
                    detail=told,
                    source=command,
                ),
                aim=1.0,
            )
        record_claim(
            Claim(
                name=f"sum of predicted noise over the measured, {where}",
                unit="times apart",
                ours=max(total, 1 / total),
                baseline=1.25,
                baseline_name="the aim",
                higher_is_better=False,
                correct=is_right,
                detail=f"predicted {total:.3f} of the measured {float(measured[:, k].sum()):.3g}; {told}",
                source=command,
            ),
            aim=1.0,
        )
    record_claim(
        Claim(
            name=f"cost of measuring all noises, {name}",
            unit="float32 steps",
            ours=took_s / step_s,
            baseline=30,
            baseline_name="the aim",
            higher_is_better=False,
            correct=is_right,
            detail=f"{took_s:.2f} s, a step {step_s:.3f} s; two batches, {len(PRECISIONS)} precisions, the check "
            "against a measurement included",
            source=command_of("alone", name),
        ),
        aim=1.0,
    )


def command_of(row, name):
    """What runs a row again."""
    return f'{COMMAND} -k "{row} and {name}"'


def time_step(job, count=5):
    """Seconds of float32 steps, the first one left out."""
    seconds = []
    for batch in job.batches[: count + 1]:
        began = time.perf_counter()
        with preserve_state(job.model):
            find_gradient(job.model, batch, job.loss_fn)
        seconds.append(time.perf_counter() - began)
    return seconds[1:]


@pytest.mark.parametrize("name", MODELS)
def bench_plans(benchmark, record_claim, name):
    """Plans of mixed precisions: their predicted noise beside the measured."""
    torch.set_num_threads(1)
    job = build_job(name, num_batches=PLAN_BATCHES, tokens=TOKENS[name])
    probed = qsync.sensitivity(
        job.model, job.batches, job.loss_fn, precisions=("fp32", *PRECISIONS)
    )
    generator = torch.Generator().manual_seed(1)

    def run():
        found = []
        while len(found) < NUM_PLANS:
            chosen = draw_precisions(list(probed.noise), PRECISIONS, generator)
            predicted = sum(probed.noise[op][p] for op, p in chosen.items())
            if 0 < predicted <= MOST_NOISE:
                measured = measure_noise(job.model, job.batches, job.loss_fn, chosen)
                found.append((predicted, measured))
        return found

    found = benchmark.pedantic(run, rounds=1)
    ratios = [predicted / measured for predicted, measured in found]
    worst = max(max(ratio, 1 / ratio) for ratio in ratios)
    noises = [measured for _, measured in found]
    record_claim(
        Claim(
            name=f"predicted noise of {NUM_PLANS} mixed plans, the one that is farthest off, {name}",
            unit="times apart",
            ours=worst,
            baseline=1.5,
            baseline_name="the aim",
            higher_is_better=False,
            correct=min(noises) > 0,
            detail=f"predicted {min(ratios):.2f} to {max(ratios):.2f} of the measured, median "
            f"{median(ratios):.2f}; measured {min(noises):.2g} to {max(noises):.2g} on {PLAN_BATCHES} batches; noises of operators by {probed.method}",
            source=command_of("plans", name),
        ),
        aim=1.0,
    )
