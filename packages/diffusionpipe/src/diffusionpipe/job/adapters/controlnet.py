"""A ControlNet with its locked U-Net.

The U-Net's first half sees neither the ControlNet nor any weight that trains, so it is a frozen
function of noisy latents. What trains is the ControlNet; gradients reach it through the U-Net's
second half, which reads the sums of both halves' skips.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from diffusionpipe.job.adapters.unet import build_tail, cut_head
from diffusionpipe.job.adapters.unet_steps import (
    EMBEDDING,
    TEXT,
    Step,
    build_layer,
    embed,
    embedding_modules,
    embedding_reads,
    list_block_steps,
    list_middle_steps,
    refuse_uneven,
)
from diffusionpipe.job.layers import Layer, State, keep_modules
from shared.errors import ConfigError

__all__ = ["ControlledUNet", "cut_controlled"]

_CONDITION = "controlnet_cond"
# Argument that takes what the locked half computed.
_LOCKED = "locked"


class ControlledUNet(nn.Module):
    """A U-Net that a ControlNet steers, as one backbone of which the ControlNet trains.

    Args:
        controlnet: diffusers' ControlNetModel.
        unet: diffusers' UNet2DConditionModel; its weights are locked.
    """

    def __init__(self, controlnet: nn.Module, unet: nn.Module) -> None:
        super().__init__()
        self.controlnet: Any = controlnet
        self.unet: Any = unet.requires_grad_(False)
        settings: Any = controlnet.config
        if settings.global_pool_conditions or getattr(unet, "encoder_hid_proj", None) is not None:
            raise ConfigError(
                "expected a ControlNet without global_pool_conditions and a U-Net without "
                "encoder_hid_proj, got one with; do hand over a list of layers"
            )

    @property
    def config(self) -> Any:
        """The U-Net's configuration."""
        return self.unet.config

    def forward(
        self,
        sample: Tensor,
        timestep: Tensor,
        encoder_hidden_states: Tensor,
        controlnet_cond: Tensor,
        added_cond_kwargs: dict[str, Tensor] | None = None,
        locked: Any = None,
    ) -> Tensor:
        """Computes what diffusers' training script does, in one piece.

        Args:
            sample: noisy latents.
            timestep: of each sample.
            encoder_hidden_states: texts.
            controlnet_cond: images that steer.
            added_cond_kwargs: as of XL.
            locked: unused: the locked half is computed again. The layers read it instead.
        """
        common = {TEXT: encoder_hidden_states, "added_cond_kwargs": added_cond_kwargs}
        residuals, middle = self.controlnet(
            sample, timestep, controlnet_cond=controlnet_cond, return_dict=False, **common
        )
        return self.unet(
            sample,
            timestep,
            down_block_additional_residuals=residuals,
            mid_block_additional_residual=middle,
            return_dict=False,
            **common,
        )[0]

    def run_locked(self, state: State) -> dict[str, Any]:
        """Runs the U-Net's first half.

        Args:
            state: its arguments, flat.

        Returns:
            The time embedding "emb", the "skips" and the result of the "middle".
        """
        begun = cut_head(self.unet).call(state)
        hidden, emb = begun["h0"], begun[EMBEDDING]
        skips = [hidden]
        for step in _list_down_steps(self.unet):
            hidden = step.run(hidden, emb, state[TEXT] if step.reads_text else None)
            skips.append(hidden)
        for step in list_middle_steps(self.unet):
            hidden = step.run(hidden, emb, state[TEXT] if step.reads_text else None)
        return {"emb": emb, "skips": tuple(skips), "middle": hidden}

    def lock(self, noising: Any) -> Callable[[Any, Mapping[str, Any], Any], dict[str, Any]]:
        """Makes the frozen function "locked" of a job.

        Args:
            noising: what a loss of `diffusionpipe.losses` returns first, with
                `locked="locked"` among its arguments.

        Returns:
            A function of (batch, frozen, draw), to be declared behind those it needs.
        """
        arguments = {
            key: name for key, name in noising.arguments.items() if key not in (_LOCKED, _CONDITION)
        }
        channels = self.config.in_channels
        inner = replace(noising, arguments=arguments, num_channels=channels)

        def run(batch: Any, frozen: Mapping[str, Any], draw: Any) -> dict[str, Any]:
            made = inner(batch, frozen, draw)
            added = made.pop("added_cond_kwargs", {})
            return self.run_locked(
                {**made, **{f"added_cond_kwargs.{key}": value for key, value in added.items()}}
            )

        return run

    def save_pretrained(self, folder: str | Path) -> None:
        """Saves the ControlNet's folder."""
        self.controlnet.save_pretrained(folder)


def cut_controlled(model: ControlledUNet) -> tuple[nn.Module, list[Layer], set[str]]:
    """Cuts a ControlNet, and the second half of its U-Net."""
    control, unet = model.controlnet, model.unet
    layers = [_cut_control_head(control)]
    for index, step in enumerate(_list_down_steps(control), 1):
        inner = build_layer(step, f"c{index - 1}", f"c{index}", TEXT)
        layers.append(_add_exit(inner, control.controlnet_down_blocks[index], index))
    num_skips = len(layers)
    for step in list_middle_steps(control):
        layers.append(
            _add_middle(
                build_layer(step, f"c{num_skips - 1}", "c", TEXT), control.controlnet_mid_block
            )
        )
    skips = list(range(num_skips))
    hidden = "h0"
    for index, block in enumerate(unet.up_blocks):
        for step in list_block_steps(block, f"up{index}"):
            number = skips.pop() if step.is_pair else None
            skip = () if number is None else (f"{_LOCKED}.skips.{number}", f"control{number}")
            written = f"h{len(layers) - num_skips}"
            layers.append(build_layer(step, hidden, written, TEXT, skip, f"{_LOCKED}.emb"))
            hidden = written
    layers.append(build_tail(unet, hidden))
    return model, layers, {EMBEDDING}


def _list_down_steps(model: Any) -> list[Step]:
    return [
        step
        for index, block in enumerate(model.down_blocks)
        for step in list_block_steps(block, f"down{index}")
    ]


def _cut_control_head(control: Any) -> Layer:
    is_reversed = control.config.controlnet_conditioning_channel_order == "bgr"

    def run_head(state: State) -> dict[str, Tensor]:
        refuse_uneven(control, state["sample"])
        condition = state[_CONDITION]
        if is_reversed:
            condition = torch.flip(condition, dims=[1])
        hidden = control.conv_in(state["sample"]) + control.controlnet_cond_embedding(condition)
        exit_value = control.controlnet_down_blocks[0](hidden)
        return {"c0": hidden, "control0": exit_value, EMBEDDING: embed(control, state)}

    modules = keep_modules(
        control.conv_in,
        control.controlnet_cond_embedding,
        control.controlnet_down_blocks[0],
        *embedding_modules(control),
    )
    reads = (*embedding_reads(control), _CONDITION)
    return Layer("head", run_head, reads, ("c0", "control0", EMBEDDING), modules)


def _add_exit(layer: Layer, exit_block: nn.Module, index: int) -> Layer:
    """Lets a step of the ControlNet write what it adds to the U-Net's skip too."""
    hidden, written = layer.writes[0], f"control{index}"

    def call(inner: Callable[[State], dict[str, Tensor]], state: State) -> dict[str, Tensor]:
        values = inner(state)
        return {**values, written: exit_block(values[hidden])}

    return replace(
        layer,
        call=partial(call, layer.call),
        writes=(hidden, written),
        modules=(*layer.modules, exit_block),
    )


def _add_middle(layer: Layer, exit_block: nn.Module) -> Layer:
    """Adds the middle of the ControlNet to that of the locked half."""
    locked = f"{_LOCKED}.middle"

    def call(inner: Callable[[State], dict[str, Tensor]], state: State) -> dict[str, Tensor]:
        return {"h0": state[locked] + exit_block(inner(state)[layer.writes[0]])}

    return replace(
        layer,
        call=partial(call, layer.call),
        reads=(*layer.reads, locked),
        writes=("h0",),
        modules=(*layer.modules, exit_block),
    )
