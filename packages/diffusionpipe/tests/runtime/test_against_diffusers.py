"""Weights after three steps beside plain diffusers code in one process: a U-Net, whole and by LoRA."""

from functools import partial

import pytest
import torch
from small_models import text_unet

from diffusionpipe.data import build_vae
from diffusionpipe.job import losses
from diffusionpipe.job.chain import chain
from diffusionpipe.job.draws import Draw
from diffusionpipe.job.job import Job
from diffusionpipe.runtime.engine import Engine
from shared.comms import RankPool

from .conftest import MODULES
from .toy import make_plan

BATCH, NUM_TOKENS, TEXT_DIM = 4, 5, 12
UNET_MODULES = (*MODULES, "diffusers.models.unets.unet_2d_condition", "peft")
SGD = partial(torch.optim.SGD, lr=0.1)
DEVICES = {
    "chain": ("chain", [[0], [1]], 2, 1),
    "folded": ("folded", [[0], [1]], 2, 1),
    "data": ("data", [[0, 1]], 1, 1),
    "folded of 4": ("folded", [[0], [1], [2], [3]], 4, 1),
    "chain, replicated": ("chain", [[0, 2], [1, 3]], 2, 2),
}


def make_models(*, has_lora):
    """A U-Net, a VAE and a text encoder in float64, the same in every process."""
    unet = text_unet().double()
    if has_lora:
        from peft import LoraConfig

        unet.requires_grad_(False)
        unet.add_adapter(LoraConfig(r=2, target_modules=["to_q", "to_k", "to_v"]))
        generator = torch.Generator().manual_seed(3)
        for parameter in unet.parameters():
            if parameter.requires_grad:
                noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.data = 0.1 * noise
    torch.manual_seed(1)
    vae = build_vae((8, 8), 16, groups=4).double().requires_grad_(False)
    texts = torch.nn.Embedding(50, TEXT_DIM).double().requires_grad_(False)
    return unet, vae, texts


def make_batches():
    generator = torch.Generator().manual_seed(5)
    return [
        {
            "pixels": torch.randn(BATCH, 3, 16, 16, generator=generator, dtype=torch.float64),
            "ids": torch.randint(0, 50, (BATCH, NUM_TOKENS), generator=generator),
        }
        for _ in range(3)
    ]


def train_plainly(*, has_lora):
    """Losses and trained weights as diffusers' training scripts compute them."""
    from diffusers import DDPMScheduler
    from torch.nn import functional

    unet, vae, texts = make_models(has_lora=has_lora)
    trained = {name: p for name, p in unet.named_parameters() if p.requires_grad}
    optimizer, scheduler = SGD(list(trained.values())), DDPMScheduler()
    found = []
    for step, batch in enumerate(make_batches()):
        draw = Draw(0, step, range(BATCH))
        with torch.no_grad():
            latents = vae.encode(batch["pixels"]).latent_dist
            states = texts(batch["ids"])
        clean = latents.mean + latents.std * draw.normal(
            latents.mean.shape[1:], "latents", like=latents.mean
        )
        noise = draw.normal(clean.shape[1:], "noise", like=clean)
        timesteps = draw.integers(0, 1000, "timestep")
        noisy = scheduler.add_noise(clean, noise, timesteps)
        predicted = unet(noisy, timesteps, encoder_hidden_states=states).sample
        loss = functional.mse_loss(predicted, noise)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(float(loss.detach()))
    return found, {name: value.detach().clone() for name, value in trained.items()}


def train(name, *, has_lora):
    """Losses, and the trained weights of this rank's stages."""
    from diffusers import DDPMScheduler

    unet, vae, texts = make_models(has_lora=has_lora)
    frozen = {
        "z": lambda batch: vae.encode(batch["pixels"]).latent_dist.parameters,
        "h": lambda batch: texts(batch["ids"]),
    }
    inputs, loss = losses.epsilon(DDPMScheduler(), latents="z", text="h")
    job = Job(chain(unet), frozen, inputs, loss)
    placement, devices, num_micro_batches, num_groups = DEVICES[name]
    plan = make_plan(
        placement, devices, num_micro_batches, num_groups, BATCH, len(job.chains[0]), ("h", "z")
    )
    engine = Engine(job, plan, SGD)
    found = list(engine.steps(make_batches()))
    held = {
        key
        for stage in plan.stages_of(engine.rank)
        for layer in range(*plan.spans[stage])
        for key, value in job.chains[0].list_parameters(layer).items()
        if value.requires_grad
    }
    return found, {key: job.trained[key].detach().clone() for key in held}


def run(name, has_lora):
    return train(name, has_lora=has_lora)


CASES = [
    pytest.param("folded", False),
    pytest.param("chain", True),
    pytest.param("chain", False, marks=pytest.mark.slow),
    pytest.param("data", False, marks=pytest.mark.slow),
    pytest.param("folded", True, marks=pytest.mark.slow),
    pytest.param("folded of 4", False, marks=pytest.mark.slow),
    pytest.param("chain, replicated", True, marks=pytest.mark.slow),
]


@pytest.fixture(scope="module")
def unet_pair():
    with RankPool(2, modules=UNET_MODULES) as pool:
        yield pool


@pytest.fixture(scope="module")
def unet_ranks():
    with RankPool(4, modules=UNET_MODULES) as pool:
        yield pool


@pytest.mark.parametrize(("name", "has_lora"), CASES)
def test_weights_are_those_of_plain_diffusers_code(request, name, has_lora):
    expected_losses, expected = train_plainly(has_lora=has_lora)
    num_ranks = sum(map(len, DEVICES[name][1]))
    pool = request.getfixturevalue({2: "unet_pair", 4: "unet_ranks"}[num_ranks])
    results = pool.run(run, name, has_lora).results
    for found, weights in results:
        assert found == pytest.approx(expected_losses, rel=1e-6)
        for key, value in weights.items():
            scale = float(expected[key].abs().max())
            assert float((value - expected[key]).abs().max()) <= 1e-9 * scale
    assert {key for _, weights in results for key in weights} == set(expected)
