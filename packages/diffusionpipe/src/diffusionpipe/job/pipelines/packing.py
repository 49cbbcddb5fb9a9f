"""Flux takes latents as tokens of two by two pixels, with their positions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from diffusionpipe.job.batches import Batch
from diffusionpipe.job.draws import Draw
from diffusionpipe.job.losses import Noising

__all__ = ["PackedNoising", "pack_latents"]

# How strongly a distilled backbone shall follow texts; 1 while it is trained.
_GUIDANCE = 1.0


@dataclass(frozen=True)
class PackedNoising:
    """Inputs of Flux: what `Noising` makes, as tokens.

    Attributes:
        noising: makes noisy latents, target and times.
        has_guidance: whether the backbone reads a strength of guidance.
    """

    noising: Noising
    has_guidance: bool

    def __call__(self, batch: Batch, frozen: Mapping[str, Any], draw: Draw) -> dict[str, Any]:
        """Makes the backbone's keyword arguments, and the target."""
        # Latents come as a distribution, so half of the channels are means.
        noising = replace(self.noising, num_channels=frozen["latents"].shape[1] // 2)
        made = noising(batch, frozen, draw)
        noisy = made.pop(noising.sample)
        rows, columns = (size // 2 for size in noisy.shape[-2:])
        states = made["encoder_hidden_states"]
        made["hidden_states"] = pack_latents(noisy)
        made["target"] = pack_latents(made["target"])
        made["timestep"] = made["timestep"] / noising.scheduler.config.num_train_timesteps
        made["txt_ids"] = states.new_zeros(states.shape[1], 3)
        made["img_ids"] = _list_positions(rows, columns, states)
        if self.has_guidance:
            made["guidance"] = noisy.new_full((len(noisy),), _GUIDANCE)
        return made


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
