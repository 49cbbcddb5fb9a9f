"""U-Nets of diffusers: a head, pairs of a resnet and an attention, samplers, a middle, a tail.

Each pair of the second half reads the value that its mirror in the first half wrote. All pairs read
the time embedding, which the head writes.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from diffusionpipe.job.adapters.unet_steps import (
    EMBEDDING,
    TEXT,
    build_layer,
    embed,
    embedding_modules,
    embedding_reads,
    list_block_steps,
    list_middle_steps,
    refuse_uneven,
    text_key,
)
from diffusionpipe.job.layers import OUTPUT, Layer, State, keep_modules

__all__ = ["build_tail", "cut_head", "cut_unet"]


def cut_unet(model: Any) -> tuple[nn.Module, list[Layer], set[str]]:
    """Cuts a UNet2DModel or a UNet2DConditionModel.

    Raises:
        ConfigError: a block or an embedding is of a kind that this adapter does not know.
    """
    text = text_key(model)
    layers = [cut_head(model)]
    skips = [layers[0].writes[0]]
    for index, block in enumerate(model.down_blocks):
        for step in list_block_steps(block, f"down{index}"):
            layers.append(build_layer(step, skips[-1], f"h{len(layers)}", text))
            skips.append(layers[-1].writes[0])
    hidden = skips[-1]
    steps = list_middle_steps(model)
    for index, block in enumerate(model.up_blocks):
        steps += list_block_steps(block, f"up{index}")
    for step in steps:
        skip = (skips.pop(),) if step.is_pair else ()
        layers.append(build_layer(step, hidden, f"h{len(layers)}", text, skip))
        hidden = layers[-1].writes[0]
    layers.append(build_tail(model, hidden))
    return model, layers, {key for key in (EMBEDDING, text) if key in layers[0].writes}


def build_tail(model: Any, hidden: str) -> Layer:
    """Makes the layer behind the last block.

    Args:
        model: a U-Net.
        hidden: key of the last hidden state.
    """
    # UNet2DModel divides what a Fourier embedding led to by its time.
    is_scaled = getattr(model.config, "time_embedding_type", None) == "fourier" and not hasattr(
        model, "encoder_hid_proj"
    )

    def run_tail(state: State) -> dict[str, Tensor]:
        value = state[hidden]
        if model.conv_norm_out is not None:
            value = model.conv_act(model.conv_norm_out(value))
        value = model.conv_out(value)
        if is_scaled:
            timestep = state["timestep"].to(value.device).expand(len(value))
            value = value / timestep.reshape(len(value), *([1] * (value.ndim - 1)))
        return {OUTPUT: value}

    reads = (hidden, "timestep") if is_scaled else (hidden,)
    modules = keep_modules(model.conv_norm_out, model.conv_act, model.conv_out)
    return Layer("tail", run_tail, reads, (OUTPUT,), modules)


def cut_head(model: Any) -> Layer:
    """Makes the layer before the first block."""
    is_projected = getattr(model, "encoder_hid_proj", None) is not None

    def run_head(state: State) -> dict[str, Tensor]:
        sample = state["sample"]
        refuse_uneven(model, sample)
        if model.config.center_input_sample:
            sample = 2 * sample - 1.0
        values = {"h0": model.conv_in(sample), EMBEDDING: embed(model, {**state, "sample": sample})}
        if is_projected:
            values["text"] = model.encoder_hid_proj(state[TEXT])
        return values

    writes = ("h0", EMBEDDING, "text") if is_projected else ("h0", EMBEDDING)
    modules = (model.conv_in, *embedding_modules(model))
    return Layer("head", run_head, embedding_reads(model), writes, modules)
