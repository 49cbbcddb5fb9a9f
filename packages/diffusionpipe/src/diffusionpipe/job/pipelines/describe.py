"""What a text-to-image pipeline of diffusers trains: its backbone, frozen parts, inputs and loss.

Batches hold "pixels", [num_samples, 3, rows, columns] from -1 to 1, and "captions", a list of texts;
of XL "time_ids" too, [num_samples, 6], if images are crops.
The pipeline's own `encode_prompt` encodes texts, so that training sees what sampling sees.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from diffusionpipe.job.batches import Batch
from diffusionpipe.job.chain import Chain, chain
from diffusionpipe.job.losses import Noising, epsilon, flow, velocity
from diffusionpipe.job.pipelines.packing import pack_inputs
from shared.errors import ConfigError, DataError
from shared.registry import Registry

__all__ = ["PIPELINES", "describe_pipeline"]

# Beyond what augmentations overshoot; whole numbers up to 255 are no pixels from -1 to 1.
_LARGEST_PIXEL = 1.5

# Backbone, frozen functions, inputs and loss.
Parts = tuple[Chain, Mapping[str, Callable[..., Any]], Callable[..., Any], Callable[..., Any]]


def describe_pipeline(pipeline: Any) -> Parts:
    """Takes a pipeline apart; its encoders ask for no gradients afterwards.

    Raises:
        ConfigError: another kind of pipeline, a prediction or scheduler that is not known here, or a
            model in a wrapper of peft.
    """
    names = [base.__name__ for base in type(pipeline).__mro__ if base.__name__ in PIPELINES]
    describe = PIPELINES.get(names[0] if names else type(pipeline).__name__)
    for name, part in pipeline.components.items():
        if hasattr(part, "get_base_model"):
            raise ConfigError(
                f"pipeline.{name}: expected a model of diffusers, got {type(part).__name__}, which "
                f"pipelines cannot save; do call pipeline.{name}.add_adapter(config) instead of wrapping it"
            )
        is_encoder = name == "vae" or name.startswith("text_encoder")
        if is_encoder and isinstance(part, nn.Module):
            part.eval()
            # Some trainable weights among fixed ones are an adapter, which `Job.check` refuses.
            if all(parameter.requires_grad for parameter in part.parameters()):
                part.requires_grad_(False)
    return describe(pipeline)


def _describe_stable_diffusion(pipeline: Any) -> Parts:
    frozen = _list_frozen(pipeline, ("states", ""), do_classifier_free_guidance=False)
    return chain(pipeline.unet), frozen, *_predict_noise(pipeline)


def _describe_xl(pipeline: Any) -> Parts:
    names = ("states", "", "pooled", "")
    frozen = _list_frozen(pipeline, names, do_classifier_free_guidance=False)
    added = {"text_embeds": "text.pooled", "time_ids": _list_image_sizes}
    return chain(pipeline.unet), frozen, *_predict_noise(pipeline, added_cond_kwargs=added)


def _describe_sd3(pipeline: Any) -> Parts:
    names = ("states", "", "pooled", "")
    options = {"prompt_2": None, "prompt_3": None, "do_classifier_free_guidance": False}
    frozen = _list_frozen(pipeline, names, **options)
    return chain(pipeline.transformer), frozen, *_predict_flow(pipeline)


def _describe_flux(pipeline: Any) -> Parts:
    frozen = _list_frozen(pipeline, ("states", "pooled", ""), prompt_2=None)
    noising, loss = _predict_flow(pipeline)
    backbone = chain(pipeline.transformer)
    bound = noising.bind(backbone, has_estimate=False)
    inputs = pack_inputs(bound, has_guidance=pipeline.transformer.config.guidance_embeds)
    return backbone, frozen, inputs, loss


PIPELINES: Registry[str, Callable[[Any], Parts]] = Registry("pipeline")
PIPELINES.add("StableDiffusionPipeline", _describe_stable_diffusion, "Stable Diffusion 1 and 2")
PIPELINES.add("StableDiffusionXLPipeline", _describe_xl, "Stable Diffusion XL")
PIPELINES.add("StableDiffusion3Pipeline", _describe_sd3, "Stable Diffusion 3 and 3.5")
PIPELINES.add("FluxPipeline", _describe_flux, "Flux.1")


def _list_frozen(
    pipeline: Any, names: tuple[str, ...], **options: Any
) -> dict[str, Callable[[Batch], Any]]:
    """Makes the functions that encode pixels and captions.

    Args:
        pipeline: of diffusers.
        names: of what its encode_prompt returns, "" of what is not used.
        **options: further arguments of encode_prompt.
    """
    vae = pipeline.vae
    # Transformers take latents in patches of two by two.
    has_patches = getattr(pipeline, "transformer", None) is not None
    multiple = 2 ** (len(vae.config.block_out_channels) - 1) * (2 if has_patches else 1)
    encoders = [part for name, part in pipeline.components.items() if name.startswith("text_enc")]

    def encode_pixels(batch: Batch) -> Tensor:
        pixels = _find(batch, "pixels")
        if isinstance(pixels, list | tuple) and len({np.shape(image) for image in pixels}) == 1:
            is_tensor = isinstance(pixels[0], Tensor)
            pixels = torch.stack(list(pixels)) if is_tensor else np.stack(pixels)
        if isinstance(pixels, np.ndarray):
            pixels = torch.as_tensor(pixels)
        if (
            not isinstance(pixels, Tensor)
            or pixels.ndim != 4
            or pixels.shape[1] != 3
            or not pixels.is_floating_point()
        ):
            raise DataError(
                "batch['pixels']: expected floats from -1 to 1 of shape [num_samples, 3, rows, "
                f"columns], got {_describe_images(pixels)}; do convert images, as by "
                "pixels.permute(0, 3, 1, 2) / 127.5 - 1, and give a batch images of one size"
            )
        if pixels.abs().max() > _LARGEST_PIXEL:
            raise DataError(
                "batch['pixels']: expected floats from -1 to 1, got some from "
                f"{float(pixels.min()):.3g} to {float(pixels.max()):.3g}; do scale them"
            )
        if any(size % multiple for size in pixels.shape[-2:]):
            raise DataError(
                f"batch['pixels']: expected rows and columns that are multiples of {multiple}, got "
                f"{list(pixels.shape[-2:])}; do crop or pad images"
            )
        return vae.encode(pixels.to(vae.device, vae.dtype)).latent_dist.parameters

    def encode_captions(batch: Batch) -> dict[str, Tensor]:
        captions = [_check_caption(caption) for caption in _find(batch, "captions")]
        # A rank that encodes no pixels has no weights of the VAE.
        device = next(encoder.device for encoder in encoders if encoder is not None)
        encoded = pipeline.encode_prompt(
            captions, device=device, num_images_per_prompt=1, **options
        )
        return {name: value for name, value in zip(names, encoded, strict=True) if name}

    return {"latents": encode_pixels, "text": encode_captions}


def _predict_noise(pipeline: Any, **arguments: Any) -> tuple[Noising, Callable[..., Any]]:
    from diffusers import DDPMScheduler

    # Schedulers for sampling share the configuration of training; defaults of betas would train wrongly.
    if "beta_schedule" not in pipeline.scheduler.config:
        raise ConfigError(
            f"scheduler: expected one with a beta_schedule, got {type(pipeline.scheduler).__name__}; do "
            "set the pipeline's scheduler to that of its training, or write inputs and loss yourself"
        )
    scheduler: Any = DDPMScheduler.from_config(pipeline.scheduler.config)
    losses = {"epsilon": epsilon, "v_prediction": velocity}
    kind = scheduler.config.prediction_type
    if kind not in losses:
        raise ConfigError(
            f"scheduler.prediction_type: expected {' or '.join(losses)}, got {kind!r}; do write the "
            "job's inputs and loss yourself"
        )
    scaling = pipeline.vae.config.scaling_factor
    return losses[kind](
        scheduler, latents="latents", text="text.states", scaling=scaling, **arguments
    )


def _predict_flow(pipeline: Any) -> tuple[Noising, Callable[..., Any]]:
    config = pipeline.vae.config
    return flow(
        pipeline.scheduler,
        latents="latents",
        text="text.states",
        scaling=config.scaling_factor,
        shift=config.shift_factor or 0.0,
        pooled_projections="text.pooled",
    )


def _list_image_sizes(batch: Batch, frozen: Mapping[str, Any]) -> Tensor:
    """XL's time_ids: original size, corner of the crop and target size of each image."""
    states = frozen["text"]["states"]
    if "time_ids" in batch:
        return torch.as_tensor(batch["time_ids"]).to(states)
    rows, columns = np.shape(_find(batch, "pixels")[0])[-2:]
    sizes = torch.tensor([rows, columns, 0, 0, rows, columns], device=states.device)
    return sizes.to(states.dtype).repeat(len(states), 1)


def _describe_images(pixels: Any) -> str:
    if isinstance(pixels, Tensor):
        return f"{pixels.dtype} {list(pixels.shape)}"
    shapes = {str(list(np.shape(image))): None for image in pixels}
    return f"{type(pixels).__name__} of images {', '.join(shapes)}"


def _check_caption(caption: Any) -> str:
    if not isinstance(caption, str):
        raise DataError(
            f"batch['captions']: expected texts, got {type(caption).__name__} {caption!r}; do hand "
            "over texts, which the pipeline's tokenizers cut and pad"
        )
    return str(caption)


def _find(batch: Batch, name: str) -> Any:
    if name not in batch:
        raise DataError(
            f"expected {name!r} in a batch of a pipeline's job, got {', '.join(batch)}; do name "
            "images 'pixels' and texts 'captions'"
        )
    return batch[name]
