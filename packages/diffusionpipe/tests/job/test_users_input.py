"""What users bring: other types, adapters, sliced encoders, arrays; each works or is refused by name."""

import numpy as np
import pytest
import small_pipelines
import torch
from small_models import text_unet, text_unet_inputs
from torch.utils.data import DataLoader

import diffusionpipe as dp
from shared.errors import ConfigError, DataError


@pytest.fixture(scope="module")
def pipe():
    return small_pipelines.stable_diffusion()


@pytest.fixture(scope="module")
def job(pipe):
    return dp.Job.from_pipeline(pipe)


@pytest.fixture(scope="module")
def expected(job):
    return compute(job, small_pipelines.batch())


def compute(job, batch):
    with torch.no_grad():
        return job.compute_loss(batch, seed=0, step=0)


@pytest.mark.parametrize("parts", [("vae", "text_encoder"), ("vae", "text_encoder", "unet")])
def test_models_in_bf16_train_near_float32(parts, expected):
    pipe = small_pipelines.stable_diffusion()
    for part in parts:
        getattr(pipe, part).to(torch.bfloat16)
    job, batch = dp.Job.from_pipeline(pipe), small_pipelines.batch()
    job.check(batch)
    loss = job.compute_loss(batch, seed=0, step=0)
    loss.backward()
    assert loss.dtype == torch.float32
    assert torch.allclose(loss, expected, rtol=0.05)
    assert all(p.grad.dtype == pipe.unet.dtype for p in job.trained.values())


def test_a_backbone_in_either_mode_trains_alike(pipe, job, expected):
    pipe.unet.eval()
    job.check(small_pipelines.batch())
    assert torch.equal(compute(job, small_pipelines.batch()), expected)
    pipe.unet.train()


def test_dropout_is_refused_while_it_is_on():
    unet = text_unet()
    unet.up_blocks[1].resnets[0].dropout.p = 0.5
    with pytest.raises(
        ConfigError, match="UNet2DConditionModel: expected a forward without random"
    ):
        dp.chain(unet.train()).check(**text_unet_inputs())
    dp.chain(unet.eval()).check(**text_unet_inputs())


def test_dropout_of_an_adapter_is_refused():
    from peft import LoraConfig

    unet = text_unet().requires_grad_(False)
    unet.add_adapter(
        LoraConfig(r=2, target_modules=["to_q"], lora_dropout=0.5, init_lora_weights=False)
    )
    with pytest.raises(ConfigError, match="set its dropout to 0"):
        dp.chain(unet.train()).check(**text_unet_inputs())


def test_an_encoder_that_slices_changes_nothing(pipe, job, expected):
    pipe.vae.enable_slicing()
    pipe.enable_attention_slicing()
    job.check(small_pipelines.batch())
    assert torch.allclose(compute(job, small_pipelines.batch()), expected, rtol=1e-5)
    pipe.vae.disable_slicing()
    pipe.disable_attention_slicing()


def test_encoders_are_put_in_evaluation():
    pipe = small_pipelines.stable_diffusion()
    pipe.text_encoder.train()
    pipe.vae.train()
    dp.Job.from_pipeline(pipe)
    assert not pipe.text_encoder.training
    assert not pipe.vae.training


@pytest.mark.parametrize("form", [list, tuple, np.array])
def test_captions_come_as_a_list_a_tuple_or_an_array(form, job, expected):
    batch = small_pipelines.batch()
    assert torch.equal(compute(job, {**batch, "captions": form(batch["captions"])}), expected)


@pytest.mark.parametrize("kind", [np.float32, np.float64])
def test_images_come_as_arrays(kind, job, expected):
    batch = small_pipelines.batch()
    arrays = {**batch, "pixels": batch["pixels"].numpy().astype(kind)}
    job.check(arrays)
    assert torch.equal(compute(job, arrays), expected)


def test_images_come_as_a_list(job, expected):
    batch = small_pipelines.batch()
    assert torch.equal(compute(job, {**batch, "pixels": list(batch["pixels"])}), expected)
    arrays = [image.numpy() for image in batch["pixels"]]
    assert torch.equal(compute(job, {**batch, "pixels": arrays}), expected)


def test_a_loaders_batches_are_taken(job, expected):
    batch = small_pipelines.batch()
    rows = [
        {"pixels": pixels.numpy(), "captions": caption, "index": index}
        for index, (pixels, caption) in enumerate(
            zip(batch["pixels"], batch["captions"], strict=True)
        )
    ]
    (loaded,) = DataLoader(rows, batch_size=3)
    assert torch.equal(compute(job, loaded), expected)
    (loaded,) = DataLoader(
        rows,
        batch_size=3,
        collate_fn=lambda rows: {key: np.stack([row[key] for row in rows]) for key in rows[0]},
    )
    assert torch.equal(compute(job, loaded), expected)


@pytest.mark.parametrize(
    ("pixels", "words"),
    [
        (np.zeros((3, 16, 16, 3), np.float32), r"got torch.float32 \[3, 16, 16, 3\]"),
        (
            torch.zeros(3, 3, 16, 16, dtype=torch.uint8),
            r"expected floats from -1 to 1 .* torch.uint8",
        ),
        (
            [torch.zeros(3, 16, 16), torch.zeros(3, 8, 8), torch.zeros(3, 16, 16)],
            r"got list of images \[3, 16, 16\], \[3, 8, 8\]; .* images of one size",
        ),
        (torch.zeros(3, 16, 16), r"\[num_samples, 3, rows, columns\]"),
        (torch.zeros(3, 3, 18, 18), r"rows and columns that are multiples of 2, got \[9, 9\]"),
    ],
)
def test_images_in_another_form_are_refused(pixels, words, job):
    with pytest.raises(DataError, match=words):
        job.check({**small_pipelines.batch(), "pixels": pixels})


@pytest.mark.parametrize("captions", [[["a"], ["b"], ["c"]], [1, 2, 3], torch.zeros(3, 5)])
def test_captions_that_are_no_texts_are_refused(captions, job):
    with pytest.raises(DataError, match=r"batch\['captions'\]: expected texts, got"):
        job.check({**small_pipelines.batch(), "captions": captions})


def test_texts_longer_than_the_tokenizer_takes_are_cut(pipe, job):
    batch = small_pipelines.batch()
    longest = pipe.tokenizer.model_max_length
    captions = [" ".join(["seven"] * longest * 2), "a seven", ""]
    job.check({**batch, "captions": captions})
    values = job.encode("text", {**batch, "captions": captions}, dp.Draw(0, 0, range(3)))
    assert values["text.states"].shape[1] == longest


def test_a_backbone_in_place_of_a_pipeline_is_refused():
    with pytest.raises(
        ConfigError, match=r"pipeline: expected one of StableDiff.* got 'UNet2DCond"
    ):
        dp.Job.from_pipeline(text_unet())


def test_weights_laid_out_by_channels_train_alike():
    pipe, batch = small_pipelines.stable_diffusion(), small_pipelines.batch()
    plain = compute(dp.Job.from_pipeline(pipe), batch)
    pipe.unet.to(memory_format=torch.channels_last)
    job = dp.Job.from_pipeline(pipe)
    job.check(batch)
    assert torch.allclose(compute(job, batch), plain, rtol=1e-5)
