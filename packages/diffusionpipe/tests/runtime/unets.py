"""A U-Net that trains whole or by LoRA: by diffusers code in one process, and by a plan on ranks."""

from functools import partial

import torch
from small_models import text_unet

from diffusionpipe.data import build_vae
from diffusionpipe.job import losses
from diffusionpipe.job.chain import chain
from diffusionpipe.job.draws import Draw
from diffusionpipe.job.job import Job
from diffusionpipe.runtime.engine import Engine

from .toy import make_plan

BATCH, NUM_TOKENS, TEXT_DIM = 4, 5, 12
MODULES = (
    "diffusers.models.autoencoders.autoencoder_kl",
    "diffusers.models.unets.unet_2d_condition",
    "diffusers.schedulers.scheduling_ddpm",
    "peft",
)
"""What a rank imports for it, which takes longer than its training."""
SGD = partial(torch.optim.SGD, lr=0.1)
DEVICES = {
    "chain": ("chain", [[0], [1]], 2, 1),
    "folded": ("folded", [[0], [1]], 2, 1),
    "data": ("data", [[0, 1]], 1, 1),
    "folded of 4": ("folded", [[0], [1], [2], [3]], 4, 1),
    "chain, replicated": ("chain", [[0, 2], [1, 3]], 2, 2),
}


def make_models(has_lora):
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


def train_plainly(has_lora):
    """Losses and trained weights as diffusers' training scripts compute them."""
    from diffusers import DDPMScheduler
    from torch.nn import functional

    unet, vae, texts = make_models(has_lora)
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


def train(name, has_lora):
    """Losses, and the trained weights of this rank's stages."""
    from diffusers import DDPMScheduler

    unet, vae, texts = make_models(has_lora)
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
