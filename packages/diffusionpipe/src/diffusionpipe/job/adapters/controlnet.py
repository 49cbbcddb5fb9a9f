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

from torch import Tensor, nn

from diffusionpipe.job.adapters.unet import EMBEDDING, TEXT, cut_front, cut_unet
from diffusionpipe.job.batches import flatten
from diffusionpipe.job.layers import ChainLayer, State

__all__ = ["ControlledUNet", "cut_controlled"]

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

    @property
    def config(self) -> Any:
        """The U-Net's configuration."""
        return self.unet.config

    @property
    def is_gradient_checkpointing(self) -> bool:
        """Whether the ControlNet's or the U-Net's layers are to be computed again for backward."""
        return self.controlnet.is_gradient_checkpointing or self.unet.is_gradient_checkpointing

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

    def lock(self, noising: Any) -> Callable[[Any, Mapping[str, Any], Any], dict[str, Any]]:
        """Makes the frozen function "locked" of a job, which runs the U-Net's first half.

        Args:
            noising: what a loss of `diffusionpipe.losses` returns first, with
                `locked="locked"` among its arguments.

        Returns:
            A function of (batch, frozen, draw), to be declared behind those it needs.
        """
        arguments = {key: name for key, name in noising.arguments.items() if key != _LOCKED}
        inner = replace(noising, arguments=arguments, num_channels=self.config.in_channels)
        front, _ = cut_front(self.unet)

        def run_locked(batch: Any, frozen: Mapping[str, Any], draw: Any) -> dict[str, Tensor]:
            made = {k: v for k, v in inner(batch, frozen, draw).items() if k != "target"}
            state = {k: t for name, value in made.items() for k, t in flatten(name, value).items()}
            values: dict[str, Tensor] = {}
            for layer in front:
                values |= layer.call(state | values)
            return values

        return run_locked

    def save_pretrained(self, folder: str | Path) -> None:
        """Saves the ControlNet's folder."""
        self.controlnet.save_pretrained(folder)


def cut_controlled(model: ControlledUNet) -> tuple[nn.Module, list[ChainLayer], set[str]]:
    """Cuts a ControlNet, and the second half of its U-Net."""
    control = model.controlnet
    front, _ = cut_front(control)
    *steps, middle = front
    exits = zip(steps, control.controlnet_down_blocks, strict=True)
    layers = [_add_exit(layer, block, f"control{i}") for i, (layer, block) in enumerate(exits)]
    layers.append(_join_middle(middle, control.controlnet_mid_block))
    _, locked, _ = cut_unet(model.unet)
    layers += [_join_control(layer) for layer in locked[len(front) :]]
    return model, layers, {EMBEDDING}


def _add_exit(layer: ChainLayer, block: nn.Module, written: str) -> ChainLayer:
    """Lets a layer of the ControlNet write what it adds to the U-Net's skip too."""
    hidden = layer.writes[0]

    def call(state: State) -> dict[str, Tensor]:
        values = layer.call(state)
        return {**values, written: block(values[hidden])}

    writes = (hidden, written, *layer.writes[1:])
    return replace(layer, call=call, writes=writes, modules=(*layer.modules, block))


def _join_middle(layer: ChainLayer, block: nn.Module) -> ChainLayer:
    """Adds the middle of the ControlNet to that of the locked half."""
    (hidden,) = layer.writes
    locked = f"{_LOCKED}.{hidden}"

    def call(state: State) -> dict[str, Tensor]:
        return {hidden: state[locked] + block(layer.call(state)[hidden])}

    return replace(layer, call=call, reads=(*layer.reads, locked), modules=(*layer.modules, block))


def _join_control(layer: ChainLayer) -> ChainLayer:
    """Lets a layer of the U-Net's second half read the locked embedding, and sums for its skip."""
    hidden, *others = layer.reads
    skips = {key: (f"{_LOCKED}.{key}", f"control{key[1:]}") for key in others if key[0] == "h"}
    times = {key: f"{_LOCKED}.{key}" for key in others if key == EMBEDDING}
    kept = tuple(key for key in others if key not in skips and key not in times)
    call = partial(_call_joined, layer, skips, times)
    reads = (hidden, *kept, *times.values(), *(key for pair in skips.values() for key in pair))
    return replace(layer, call=call, reads=reads)


def _call_joined(
    layer: ChainLayer, skips: dict[str, tuple[str, str]], times: dict[str, str], state: State
) -> dict[str, Tensor]:
    sums = {key: state[locked] + state[control] for key, (locked, control) in skips.items()}
    return layer.call({**state, **sums, **{key: state[locked] for key, locked in times.items()}})
