"""U-Nets of diffusers: a head, pairs of a resnet and an attention, samplers, a middle, a tail.

Each pair of the second half reads the value that its mirror in the first half wrote. All pairs read
the time embedding, which the head writes. What else a configuration may ask for (projected texts,
other embeddings) is left out, and refused by `Chain.check`.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from diffusionpipe.job.layers import OUTPUT, ChainLayer, State, keep_modules
from shared.errors import ConfigError, DataError

__all__ = ["EMBEDDING", "TEXT", "cut_front", "cut_unet"]

# Keys of the time embedding and of the text; and of what XL embeds beside the time.
EMBEDDING, TEXT = "emb", "encoder_hidden_states"
_POOLED, _SIZES = "added_cond_kwargs.text_embeds", "added_cond_kwargs.time_ids"
# A block of these classes computes its resnets, each followed by its attention if it has one, and
# then its sampler. Other blocks go other ways.
_BLOCKS = (
    "AttnDownBlock2D",
    "AttnUpBlock2D",
    "CrossAttnDownBlock2D",
    "CrossAttnUpBlock2D",
    "DownBlock2D",
    "UpBlock2D",
)


def cut_unet(model: Any) -> tuple[nn.Module, list[ChainLayer], set[str]]:
    """Cuts a UNet2DModel or a UNet2DConditionModel.

    Raises:
        ConfigError: a block is of a kind that this adapter does not know.
    """
    layers, skips = cut_front(model)
    for index, block in enumerate(model.up_blocks):
        for name, part, attention in _list_parts(block, f"up{index}"):
            hidden, written = layers[-1].writes[0], f"h{len(layers)}"
            skip = () if attention is False else (skips.pop(),)
            layers.append(_cut_part(name, block, part, attention, hidden, written, skip))
    layers.append(_cut_tail(model, layers[-1].writes[0]))
    return model, layers, {EMBEDDING}


def cut_front(model: Any) -> tuple[list[ChainLayer], list[str]]:
    """Cuts the first half and the middle of a U-Net or a ControlNet.

    Returns:
        Layers that write "h0", "h1", ...; and the keys of the skips.
    """
    layers, skips = [_cut_head(model)], ["h0"]
    for index, block in enumerate(model.down_blocks):
        for name, part, attention in _list_parts(block, f"down{index}"):
            written = f"h{len(layers)}"
            layers.append(_cut_part(name, block, part, attention, skips[-1], written))
            skips.append(written)
    middle = model.mid_block
    if middle is not None:
        written = f"h{len(layers)}"
        layers.append(_cut_part("middle", middle, middle, None, skips[-1], written))
    return layers, skips


def _cut_head(model: Any) -> ChainLayer:
    condition = getattr(model, "controlnet_cond_embedding", None)
    factor = 2 ** sum(bool(getattr(block, "downsamplers", None)) for block in model.down_blocks)

    def run_head(state: State) -> dict[str, Tensor]:
        sample = state["sample"]
        # A sampler would need the size of a pending skip.
        if any(size % factor for size in sample.shape[-2:]):
            raise DataError(
                f"sample: expected rows and columns that are multiples of {factor}, got "
                f"{list(sample.shape[-2:])}; do crop or pad the images"
            )
        if getattr(model.config, "center_input_sample", False):
            sample = 2 * sample - 1.0
        hidden = model.conv_in(sample)
        if condition is not None:
            image = state["controlnet_cond"]
            is_reversed = model.config.controlnet_conditioning_channel_order == "bgr"
            hidden = hidden + condition(torch.flip(image, dims=[1]) if is_reversed else image)
        return {"h0": hidden, EMBEDDING: _embed(model, state)}

    reads = ["sample", "timestep"]
    if model.class_embedding is not None:
        reads.append("class_labels")
    if _adds_pooled(model):
        reads += [_POOLED, _SIZES]
    if condition is not None:
        reads.append("controlnet_cond")
    names = ("time_proj", "time_embedding", "class_embedding", "add_time_proj", "add_embedding")
    modules = keep_modules(
        model.conv_in, condition, *(getattr(model, name, None) for name in names)
    )
    return ChainLayer("head", run_head, tuple(reads), ("h0", EMBEDDING), modules)


def _embed(model: Any, state: State) -> Tensor:
    """The embedding of time, class, and of pooled texts and sizes."""
    sample = state["sample"]
    timestep = state["timestep"].to(sample.device).expand(len(sample))
    emb = model.time_embedding(model.time_proj(timestep).to(dtype=sample.dtype))
    if model.class_embedding is not None:
        emb = emb + model.class_embedding(state["class_labels"]).to(dtype=sample.dtype)
    if _adds_pooled(model):
        text, ids = state[_POOLED], state[_SIZES]
        times = model.add_time_proj(ids.flatten()).reshape(len(text), -1)
        emb = emb + model.add_embedding(torch.cat([text, times], dim=-1).to(emb.dtype))
    return emb


def _adds_pooled(model: Any) -> bool:
    return getattr(model.config, "addition_embed_type", None) == "text_time"


def _cut_tail(model: Any, hidden: str) -> ChainLayer:
    def run_tail(state: State) -> dict[str, Tensor]:
        value = state[hidden]
        if model.conv_norm_out is not None:
            value = model.conv_act(model.conv_norm_out(value))
        return {OUTPUT: model.conv_out(value)}

    modules = keep_modules(model.conv_norm_out, model.conv_act, model.conv_out)
    return ChainLayer("tail", run_tail, (hidden,), (OUTPUT,), modules)


def _list_parts(block: Any, name: str) -> Iterator[tuple[str, Any, Any]]:
    """A block's resnets with their attention or None, and its samplers with False.

    Raises:
        ConfigError: a block of another kind.
    """
    kind = type(block).__name__
    if kind not in _BLOCKS:
        raise ConfigError(
            f"{name}: expected a block of the kinds {', '.join(_BLOCKS)}, got {kind}; do hand over "
            "a list of layers instead of the model"
        )
    attentions = getattr(block, "attentions", None) or [None] * len(block.resnets)
    for index, (resnet, attention) in enumerate(zip(block.resnets, attentions, strict=True)):
        yield f"{name}.{index}", resnet, attention
    for sampler in getattr(block, "downsamplers", None) or getattr(block, "upsamplers", None) or ():
        yield f"{name}.sampler", sampler, False


def _cut_part(
    name: str,
    block: Any,
    part: Any,
    attention: Any,
    hidden: str,
    written: str,
    skip: tuple[str, ...] = (),
) -> ChainLayer:
    """Makes a layer of a resnet with its attention, of a sampler, or of a whole middle block."""
    kinds = (getattr(block, "downsample_type", None), getattr(block, "upsample_type", None))
    is_sampler = attention is False
    time_key = None if is_sampler and "resnet" not in kinds else EMBEDDING
    reads_text = getattr(block, "has_cross_attention", False) and not is_sampler

    def run_part(state: State) -> dict[str, Tensor]:
        value = state[hidden]
        if skip:
            value = torch.cat([value, state[skip[0]]], dim=1)
        states = {TEXT: state[TEXT]} if reads_text else {}
        if is_sampler:
            return {written: part(value, temb=state[time_key]) if time_key else part(value)}
        if part is block:
            return {written: part(value, state[EMBEDDING], **states)}
        value = part(value, state[EMBEDDING])
        if attention is None:
            return {written: value}
        attend = partial(attention, return_dict=False) if states else attention
        result = attend(value, **states)
        return {written: result[0] if states else result}

    reads = (hidden, *([time_key] if time_key else []), *([TEXT] if reads_text else []), *skip)
    return ChainLayer(name, run_part, reads, (written,), keep_modules(part, attention))
