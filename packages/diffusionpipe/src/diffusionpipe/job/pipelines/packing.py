"""Flux takes latents as tokens of two by two pixels, with their positions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from diffusionpipe.job.batches import Batch
from diffusionpipe.job.draws import Draw
from diffusionpipe.job.losses import Noising

__all__ = ["pack_inputs", "pack_latents"]

# How strongly a distilled backbone shall follow texts; 1 while it is trained.
_GUIDANCE = 1.0


def pack_inputs(noising: Noising, *, has_guidance: bool) -> Callable[..., dict[str, Any]]:
    """Makes inputs of Flux: what a bound `Noising` makes, as tokens.

    Args:
        noising: makes noisy latents, target and times.
        has_guidance: whether the backbone reads a strength of guidance.
    """

    def make_inputs(batch: Batch, frozen: Mapping[str, Any], draw: Draw) -> dict[str, Any]:
        # Latents come as a distribution, so half of the channels are means.
        channels = frozen["latents"].shape[1] // 2
        made = replace(noising, num_channels=channels)(batch, frozen, draw)
        noisy, states = made[noising.sample], made["encoder_hidden_states"]
        rows, columns = (size // 2 for size in noisy.shape[-2:])
        made[noising.sample] = pack_latents(noisy)
        made["target"] = pack_latents(made["target"])
        made["timestep"] = made["timestep"] / noising.scheduler.config.num_train_timesteps
        made["txt_ids"] = states.new_zeros(states.shape[1], 3)
        made["img_ids"] = _list_positions(rows, columns, states)
        if has_guidance:
            made["guidance"] = noisy.new_full((len(noisy),), _GUIDANCE)
        return made

    return make_inputs


def pack_latents(latents: Tensor) -> Tensor:
    """Makes a token of each two by two pixels.

    Args:
        latents: [num_samples, channels, rows, columns], rows and columns even.

    Returns:
        [num_samples, rows * columns / 4, channels * 4].
    """
    blocks = latents.unflatten(2, (-1, 2)).unflatten(4, (-1, 2))
    return blocks.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)


def _list_positions(rows: int, columns: int, like: Tensor) -> Tensor:
    """Each token's image, row and column: [rows * columns, 3]."""
    grid = torch.cartesian_prod(torch.arange(rows), torch.arange(columns))
    return torch.cat([torch.zeros(len(grid), 1), grid], dim=1).to(like)
