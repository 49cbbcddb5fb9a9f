"""Jobs of pipelines against training steps written out as in diffusers' own scripts."""

from typing import Any

import numpy as np
import pytest
import small_pipelines
import torch
from torch import nn
from torch.nn import functional

import diffusionpipe as dp
from shared.errors import ConfigError, DataError

SEED, STEP = 5, 2


def _draw(rows):
    return dp.Draw(SEED, STEP, range(rows))


def _encode_latents(pipe, pixels, draw):
    posterior = pipe.vae.encode(pixels).latent_dist
    noise = draw.normal(posterior.mean.shape[1:], "latents", like=posterior.mean)
    shift = pipe.vae.config.shift_factor or 0.0
    return (posterior.mean + posterior.std * noise - shift) * pipe.vae.config.scaling_factor


def _encode_texts(pipe, captions, **options):
    with torch.no_grad():
        return pipe.encode_prompt(captions, device="cpu", num_images_per_prompt=1, **options)


def _stable_diffusion_loss(pipe, batch, draw):
    from diffusers import DDPMScheduler

    scheduler = DDPMScheduler.from_config(pipe.scheduler.config)
    with torch.no_grad():
        latents = _encode_latents(pipe, batch["pixels"], draw)
        ids = pipe.tokenizer(
            batch["captions"],
            padding="max_length",
            max_length=pipe.tokenizer.model_max_length,
            truncation=True,
            return_tensors="pt",
        ).input_ids
        states = pipe.text_encoder(ids)[0]
    noise, timestep = draw.normal(latents.shape[1:], like=latents), draw.integers(0, 1000)
    noisy = scheduler.add_noise(latents, noise, timestep)
    kind = scheduler.config.prediction_type
    target = noise if kind == "epsilon" else scheduler.get_velocity(latents, noise, timestep)
    return functional.mse_loss(pipe.unet(noisy, timestep, states).sample, target)


def _xl_loss(pipe, batch, draw):
    from diffusers import DDPMScheduler

    scheduler = DDPMScheduler.from_config(pipe.scheduler.config)
    with torch.no_grad():
        latents = _encode_latents(pipe, batch["pixels"], draw)
    options = {"do_classifier_free_guidance": False}
    states, _, pooled, _ = _encode_texts(pipe, batch["captions"], **options)
    noise, timestep = draw.normal(latents.shape[1:], like=latents), draw.integers(0, 1000)
    noisy = scheduler.add_noise(latents, noise, timestep)
    added = {
        "text_embeds": pooled,
        "time_ids": torch.tensor([[16, 16, 0, 0, 16, 16]] * len(states)).to(states),
    }
    output = pipe.unet(noisy, timestep, states, added_cond_kwargs=added).sample
    return functional.mse_loss(output, noise)


def _noise_by_flow(pipe, latents, draw):
    count = pipe.scheduler.config.num_train_timesteps
    fresh = type(pipe.scheduler).from_config(pipe.scheduler.config)
    index = (torch.sigmoid(draw.normal((), "timestep")) * count).long()
    noise = draw.normal(latents.shape[1:], like=latents)
    sigma = fresh.sigmas[index].to(latents)[:, None, None, None]
    return fresh.timesteps[index], (1 - sigma) * latents + sigma * noise, noise - latents


def _sd3_loss(pipe, batch, draw):
    with torch.no_grad():
        latents = _encode_latents(pipe, batch["pixels"], draw)
    options = {"prompt_2": None, "prompt_3": None, "do_classifier_free_guidance": False}
    states, _, pooled, _ = _encode_texts(pipe, batch["captions"], **options)
    timestep, noisy, target = _noise_by_flow(pipe, latents, draw)
    output = pipe.transformer(noisy, states, pooled, timestep).sample
    return functional.mse_loss(output, target)


def _flux_loss(pipe, batch, draw):
    with torch.no_grad():
        latents = _encode_latents(pipe, batch["pixels"], draw)
    states, pooled, text_ids = _encode_texts(pipe, batch["captions"], prompt_2=None)
    timestep, noisy, target = _noise_by_flow(pipe, latents, draw)
    rows, columns = (size // 2 for size in noisy.shape[-2:])
    tokens, ids = [], []
    for row in range(rows):
        for column in range(columns):
            block = noisy[:, :, 2 * row : 2 * row + 2, 2 * column : 2 * column + 2]
            tokens.append(block.flatten(1))
            ids.append([0, row, column])
    output = pipe.transformer(
        hidden_states=torch.stack(tokens, 1),
        encoder_hidden_states=states,
        pooled_projections=pooled,
        timestep=timestep / 1000,
        img_ids=torch.tensor(ids).to(states),
        txt_ids=text_ids,
        guidance=torch.ones(len(states)).to(states),
    ).sample
    images = torch.empty_like(target)
    for index, (_, row, column) in enumerate(ids):
        block = output[:, index].reshape(len(output), -1, 2, 2)
        images[:, :, 2 * row : 2 * row + 2, 2 * column : 2 * column + 2] = block
    return functional.mse_loss(images, target)


FAMILIES = {
    "stable diffusion": (small_pipelines.stable_diffusion, _stable_diffusion_loss),
    "stable diffusion, velocity": (
        lambda: small_pipelines.stable_diffusion("v_prediction"),
        _stable_diffusion_loss,
    ),
    "xl": (small_pipelines.xl, _xl_loss),
    "sd3": (small_pipelines.sd3, _sd3_loss),
    "flux": (small_pipelines.flux, _flux_loss),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_pipelines_job_is_its_training_script(family):
    build, compute_plain_loss = FAMILIES[family]
    pipe = build()
    job, batch = dp.Job.from_pipeline(pipe), small_pipelines.batch()
    job.check(batch)
    model = job.chains[0].model
    expected = compute_plain_loss(pipe, batch, _draw(3))
    expected.backward()
    theirs = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    loss = job.compute_loss(batch, seed=SEED, step=STEP)
    loss.backward()
    assert torch.allclose(loss, expected, rtol=1e-5)
    for name, parameter in model.named_parameters():
        scale = theirs[name].abs().max()
        assert torch.allclose(parameter.grad, theirs[name], rtol=0, atol=float(2e-5 * scale) + 1e-9)
    encoders = [part for name, part in pipe.components.items() if "text_encoder" in name]
    for part in (pipe.vae, *encoders):
        assert not any(parameter.requires_grad for parameter in part.parameters())


def test_a_trained_pipeline_is_exported_and_generates(tmp_path):
    from diffusers import StableDiffusionPipeline

    small_pipelines.stable_diffusion().save_pretrained(tmp_path / "in")
    pipe = StableDiffusionPipeline.from_pretrained(tmp_path / "in")
    job, batch = dp.Job.from_pipeline(pipe), small_pipelines.batch()
    before = pipe.unet.conv_in.weight.detach().clone()
    optimizer = torch.optim.SGD(job.trained.values(), 0.1)
    job.compute_loss(batch, seed=0, step=0).backward()
    optimizer.step()
    job.export(tmp_path / "out")
    loaded = StableDiffusionPipeline.from_pretrained(tmp_path / "out")
    assert torch.equal(loaded.unet.conv_in.weight, pipe.unet.conv_in.weight)
    assert not torch.equal(loaded.unet.conv_in.weight, before)
    loaded.set_progress_bar_config(disable=True)
    options = {"num_inference_steps": 2, "output_type": "np", "height": 16, "width": 16}
    pipelines: list[Any] = [loaded, pipe]
    images = [
        which("a seven", generator=torch.Generator().manual_seed(0), **options).images
        for which in pipelines
    ]
    assert images[0].shape == (1, 16, 16, 3)
    assert np.array_equal(*images)


def test_a_pipelines_adapter_is_exported_alone(tmp_path):
    from peft import LoraConfig

    pipe = small_pipelines.stable_diffusion()
    pipe.unet.requires_grad_(False)
    torch.manual_seed(3)
    pipe.unet.add_adapter(LoraConfig(r=2, target_modules=["to_q"], init_lora_weights=False))
    job, batch = dp.Job.from_pipeline(pipe), small_pipelines.batch()
    job.check(batch)
    assert all("lora" in name for name in job.trained)
    job.export(tmp_path)
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 200_000
    other = small_pipelines.stable_diffusion()
    other.load_lora_weights(tmp_path)
    state = job.prepare(batch, _encode_all(job, batch), _draw(3))[0].state
    with torch.no_grad():
        assert torch.allclose(
            other.unet(**state).sample, pipe.unet(**state).sample, rtol=1e-5, atol=1e-6
        )


def _encode_all(job, batch):
    return {
        key: value
        for component in job.components
        for key, value in job.encode(component, batch, _draw(3)).items()
    }


def test_an_encoder_with_an_adapter_is_refused():
    from peft import LoraConfig, inject_adapter_in_model

    pipe = small_pipelines.stable_diffusion()
    inject_adapter_in_model(LoraConfig(r=2, target_modules=["q_proj"]), pipe.text_encoder)
    with pytest.raises(ConfigError, match=r"frozen\['text'\]: .* got 4 trainable parameters among"):
        dp.Job.from_pipeline(pipe).check(small_pipelines.batch())


def test_other_pipelines_predictions_and_batches_are_refused():
    with pytest.raises(
        ConfigError, match=r"pipeline: expected one of StableDiffusionPipeline, .*Linear"
    ):
        dp.Job.from_pipeline(nn.Linear(1, 1))
    with pytest.raises(ConfigError, match="expected epsilon or v_prediction, got 'sample'"):
        dp.Job.from_pipeline(small_pipelines.stable_diffusion("sample"))
    job = dp.Job.from_pipeline(small_pipelines.stable_diffusion())
    batch = small_pipelines.batch()
    nameless = {"pixels": batch["pixels"], "texts": batch["captions"]}
    with pytest.raises(DataError, match=r"expected 'captions' in a batch .* got pixels, texts"):
        job.check(nameless)


def test_texts_and_latents_go_where_they_are_read():
    job = dp.Job.from_pipeline(small_pipelines.xl())
    (feeds,) = job.feeds(small_pipelines.batch(2))
    assert feeds == {
        "sample": ("latents",),
        "timestep": (),
        "encoder_hidden_states": ("text.states",),
        "added_cond_kwargs.text_embeds": ("text.pooled",),
        "added_cond_kwargs.time_ids": (),
        "target": (),
    }


def _add_adapters(unet):
    """A style that stays, and one that trains."""
    from peft import LoraConfig

    unet.requires_grad_(False)
    torch.manual_seed(3)
    for name in ("style", "mine"):
        config = LoraConfig(r=2, target_modules=["to_q"], init_lora_weights=False)
        unet.add_adapter(config, adapter_name=name)
    unet.set_adapters(["style", "mine"])
    for name, weight in unet.named_parameters():
        weight.requires_grad_(".mine." in name)


def test_of_two_adapters_the_trained_one_is_exported(tmp_path):
    pipe = small_pipelines.stable_diffusion()
    _add_adapters(pipe.unet)
    job = dp.Job.from_pipeline(pipe)
    assert all(".mine." in name for name in job.trained)
    expected = [weight.detach() for name, weight in sorted(job.trained.items())]
    job.validate()
    job.export(tmp_path / "pipeline")
    # A job of one's own exports the backbone's folder.
    dp.Job(job.backbone, job.frozen, job.inputs, job.loss).export(tmp_path / "plain")
    for folder in ("pipeline", "plain"):
        other = small_pipelines.stable_diffusion()
        if folder == "plain":
            other.unet.load_lora_adapter(
                tmp_path / folder, prefix=None, adapter_name="mine", use_safetensors=True
            )
        else:
            other.load_lora_weights(tmp_path / folder, adapter_name="mine")
        own = [w for name, w in sorted(other.unet.named_parameters()) if ".mine." in name]
        assert len(own) == len(expected) > 0
        assert all(torch.equal(a, b) for a, b in zip(own, expected, strict=True))


def test_weights_that_train_beside_an_adapter_are_refused():
    pipe = small_pipelines.stable_diffusion()
    _add_adapters(pipe.unet)
    pipe.unet.conv_in.requires_grad_(True)
    job = dp.Job.from_pipeline(pipe)
    with pytest.raises(
        ConfigError, match=r"expected one adapter that trains, .* got mine, conv_in"
    ):
        job.validate()
    pipe.unet.requires_grad_(True)
    with pytest.raises(ConfigError, match=r"expected one adapter that trains, .* got mine, style"):
        job.validate()


def test_a_pipeline_with_a_wrapped_model_is_refused():
    from peft import LoraConfig, get_peft_model

    pipe = small_pipelines.stable_diffusion()
    pipe.unet = get_peft_model(pipe.unet, LoraConfig(r=2, target_modules=["to_q"]))
    with pytest.raises(
        ConfigError, match=r"pipeline.unet: expected a model of diffusers, got Peft"
    ):
        dp.Job.from_pipeline(pipe)


@pytest.mark.parametrize(
    ("build", "kind", "match"),
    [
        (
            "stable_diffusion",
            "FlowMatchEulerDiscreteScheduler",
            "expected one with a beta_schedule",
        ),
        ("xl", "EDMEulerScheduler", "expected one with a beta_schedule"),
        ("sd3", "EulerDiscreteScheduler", "expected one of flow matching"),
        ("flux", "DPMSolverMultistepScheduler", "expected one of flow matching"),
    ],
)
def test_schedulers_of_another_training_are_refused(build, kind, match):
    import diffusers

    pipe = getattr(small_pipelines, build)()
    pipe.scheduler = getattr(diffusers, kind)()
    with pytest.raises(ConfigError, match=f"scheduler: {match}.* got {kind}"):
        dp.Job.from_pipeline(pipe)


def test_xl_takes_lists_of_images_and_crops():
    job, batch = dp.Job.from_pipeline(small_pipelines.xl()), small_pipelines.batch()
    whole = job.compute_loss(batch, seed=0, step=0)
    listed = batch | {"pixels": list(batch["pixels"])}
    assert torch.equal(job.compute_loss(listed, seed=0, step=0), whole)
    sizes = [[64, 64, 0, 0, 16, 16]] * 2 + [[32, 64, 8, 0, 16, 16]]
    (prepared,) = job.prepare(batch | {"time_ids": sizes}, _encode_all(job, batch), _draw(3))
    assert prepared.state["added_cond_kwargs.time_ids"].tolist() == sizes


@pytest.mark.parametrize(("build", "multiple"), [("stable_diffusion", 2), ("sd3", 4), ("flux", 4)])
def test_pixels_of_another_scale_or_size_are_refused(build, multiple):
    job = dp.Job.from_pipeline(getattr(small_pipelines, build)())
    batch = small_pipelines.batch()
    with pytest.raises(DataError, match=r"expected floats from -1 to 1, got some from .* to 2\d\d"):
        job.check(batch | {"pixels": batch["pixels"] * 127.5 + 127.5})
    odd = torch.zeros(3, 3, 16, 16 + multiple // 2)
    with pytest.raises(DataError, match=f"rows and columns that are multiples of {multiple}, got"):
        job.check(batch | {"pixels": odd})
