"""Weights after three steps of SGD on one, two and four ranks beside plain diffusers code in one process, float32.

A U-Net of Stable Diffusion's class, whole, by LoRA and self-conditioned; chain, folded and replicated
plans with filled frozen parts. The plain code is what diffusers' training scripts do, with the same draws.
The control hands the engine the previous batch's pixels for its frozen part, as a look-ahead that lags by
one would: the same comparison must then fail.
"""

import sys
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import diffusionpipe as dp
from diffusionpipe.data import build_unet, build_vae
from diffusionpipe.job.draws import decide
from shared.claims import Claim
from shared.comms import RankPool
from shared.topology import Cluster, Link
from shared.topology.device import CPU

sys.path.insert(0, str(Path(__file__).parent))

from turns import gather

PEERS = [
    {
        "peer": "plain diffusers code",
        "setting": "AutoencoderKL, UNet2DConditionModel and DDPMScheduler in one process, the whole batch at once, SGD",
        "why": "the weights that training should reach",
    },
]
BATCH, STEPS, TOKENS, TEXT_DIM, SEED = 8, 3, 5, 32, 0
KINDS = ("whole", "lora", "conditioned")
SHAPES = {
    1: [("data", 1, 2)],
    2: [("data", 1, 2), ("chain", 2, 4), ("folded", 2, 4)],
    4: [("data", 1, 2), ("chain", 4, 4), ("folded", 4, 4), ("chain", 2, 2), ("folded", 2, 2)],
}
"""By number of ranks, placement, stages and micro-batches; 2 stages on 4 ranks are replicated."""
PROBABILITY, AIM, LEAST = 0.6, 1e-6, 1e-3
"""Of predicting twice; largest relative difference of weights; least relative change that training makes."""
SGD = partial(torch.optim.SGD, lr=0.1)
COMMAND = "hatch run bench diffusionpipe/weights"


def make_models(kind):
    """U-Net, VAE and text encoder; the same in every process."""
    torch.manual_seed(0)
    unet = build_unet(
        (32, 64), text_dim=TEXT_DIM, sample_size=8, in_channels=8 if kind == "conditioned" else 4
    )
    if kind == "lora":
        from peft import LoraConfig

        unet.requires_grad_(False)
        unet.add_adapter(LoraConfig(r=4, target_modules=["to_q", "to_k", "to_v", "to_out.0"]))
        for parameter in unet.parameters():
            if parameter.requires_grad:
                parameter.data.normal_(0, 0.1)
    vae = build_vae((16, 16), 16, groups=4).requires_grad_(False).eval()
    texts = nn.Embedding(50, TEXT_DIM).requires_grad_(False)
    return unet, vae, texts


def make_batches(*, is_stale):
    """Batches; stale ones have the pixels of the batch before, so that only the frozen part differs."""
    generator = torch.Generator().manual_seed(5)
    pixels = [torch.randn(BATCH, 3, 16, 16, generator=generator) for _ in range(STEPS)]
    ids = [torch.randint(0, 50, (BATCH, TOKENS), generator=generator) for _ in range(STEPS)]
    if is_stale:
        pixels = [pixels[0], *pixels[:-1]]
    return [{"pixels": p, "ids": i} for p, i in zip(pixels, ids, strict=True)]


def train_plainly(kind):
    """Losses and trained weights, and by how much training changed them."""
    from diffusers import DDPMScheduler

    unet, vae, texts = make_models(kind)
    trained = {name: p for name, p in unet.named_parameters() if p.requires_grad}
    before = {name: p.detach().clone() for name, p in trained.items()}
    optimizer = SGD(list(trained.values()))
    scheduler: Any = DDPMScheduler()
    losses = []
    for step, batch in enumerate(make_batches(is_stale=False)):
        draw = dp.Draw(SEED, step, range(BATCH))
        with torch.no_grad():
            latents = vae.encode(batch["pixels"]).latent_dist
            states = texts(batch["ids"])
        shape = latents.mean.shape[1:]
        clean = latents.mean + latents.std * draw.normal(shape, "latents")
        noise, timesteps = draw.normal(shape, "noise"), draw.integers(0, 1000, "timestep")
        noisy = scheduler.add_noise(clean, noise, timesteps)

        def predict(estimate, noisy=noisy, timesteps=timesteps, states=states):
            sample = noisy if estimate is None else torch.cat([noisy, estimate], 1)
            return unet(sample, timesteps, encoder_hidden_states=states).sample

        estimate = torch.zeros_like(noisy) if kind == "conditioned" else None
        if estimate is not None and decide(SEED, step, PROBABILITY):
            level = scheduler.alphas_cumprod[timesteps][:, None, None, None]
            with torch.no_grad():
                estimate = (noisy - (1 - level).sqrt() * predict(estimate)) / level.sqrt()
        loss = functional.mse_loss(predict(estimate), noise)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    weights = {name: p.detach().clone() for name, p in trained.items()}
    return losses, weights, measure_distance(before, weights)


def measure_distance(weights, others):
    """Length of the difference over that of the others."""
    apart = sum(float((weights[n] - others[n]).double().square().sum()) for n in weights)
    return (apart / sum(float(others[n].double().square().sum()) for n in weights)) ** 0.5


def make_job(kind):
    from diffusers import DDPMScheduler

    unet, vae, texts = make_models(kind)
    frozen = {
        "z": lambda batch: vae.encode(batch["pixels"]).latent_dist.parameters,
        "h": lambda batch: texts(batch["ids"]),
    }
    inputs, loss = dp.losses.epsilon(DDPMScheduler(), latents="z", text="h")
    probability = PROBABILITY if kind == "conditioned" else 0.0
    return dp.Job(dp.chain(unet), frozen, inputs, loss, self_conditioning=probability)


def train(kind, shape, is_stale):
    """Losses, and on every rank the whole trained weights."""
    torch.set_num_threads(1)
    placement, stages, count = shape
    job = make_job(kind)
    num_ranks = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    cluster = Cluster.uniform(1, num_ranks, CPU, local=Link(alpha_s=1e-4, beta_s_per_byte=1e-9))
    batches = make_batches(is_stale=is_stale)
    plan = dp.plan(
        job, dp.profile(job, batches[0], sizes=(1, 2), repeats=1), cluster, batch_size=BATCH,
        placement=placement, num_stages=stages, num_micro_batches=count,
    )  # fmt: skip
    engine = dp.Engine(job, plan, SGD, seed=SEED)
    losses = list(engine.steps(batches))
    held = [
        {
            name: value.detach()
            for stage in plan.stages_of(engine.rank)
            for layer in range(*plan.spans[stage])
            for name, value in job.chains[0].list_parameters(layer).items()
            if value.requires_grad
        }
    ]
    every = gather(held[0]) if num_ranks > 1 else held
    return losses, {name: value for own in every for name, value in own.items()}


@pytest.mark.parametrize("num_ranks", list(SHAPES))
def bench_weights(benchmark, record_claim, num_ranks):
    """Every shape of plan, each way of training."""

    def run():
        modules = (
            "diffusionpipe.runtime.engine",
            "diffusers.models.unets.unet_2d_condition",
            "peft",
        )
        errors, faults, stale = {}, [], []
        plain = {kind: train_plainly(kind) for kind in KINDS}
        with RankPool(num_ranks, timeout=timedelta(minutes=5), modules=modules) as pool:
            for kind, (losses, weights, change) in plain.items():
                for shape in SHAPES[num_ranks]:
                    found, trained = pool.run(train, kind, shape, False).results[0]
                    case = f"{kind}, {shape[0]} of {shape[1]}"
                    errors[case] = measure_distance(trained, weights)
                    is_close = all(
                        abs(a / b - 1) < 1e-4 for a, b in zip(found, losses, strict=True)
                    )
                    if set(trained) != set(weights) or change < LEAST or not is_close:
                        faults.append(case)
                _, trained = pool.run(train, kind, SHAPES[num_ranks][-1], True).results[0]
                stale.append(measure_distance(trained, weights))
        return errors, faults, stale

    torch.set_num_threads(1)
    errors, faults, stale = benchmark.pedantic(run, rounds=1)
    record_claim(
        Claim(
            name=f"weights after {STEPS} steps on {num_ranks} ranks: largest difference", unit="relative",
            ours=max(errors.values()), baseline=AIM, baseline_name="the aim, of plain diffusers code",
            higher_is_better=False,
            correct=not faults and min(stale) > AIM and max(errors.values()) <= AIM,
            ratio=AIM / max(*errors.values(), 1e-12),
            detail=", ".join(f"{case} {error:.1e}" for case, error in errors.items())
            + f"; control, frozen outputs of the batch before: at least {min(stale):.1e}"
            + (f"; not as they should be: {', '.join(faults)}" if faults else ""),
            source=f"{COMMAND} -k {num_ranks}",
        ),
        aim=1.0,
    )  # fmt: skip
