"""Parts that diffusion transformers share: patches back to pixels, and keys of their values."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["EMBEDDING", "HIDDEN", "TEXT", "join_patches"]

# Key of the embedding of times and pooled texts, and of two of the models' arguments.
EMBEDDING = "temb"
HIDDEN = "hidden_states"
TEXT = "encoder_hidden_states"


def join_patches(tokens: Tensor, rows: int, columns: int, patch: int) -> Tensor:
    """Puts tokens of patches together to images.

    Args:
        tokens: [num_samples, rows * columns, patch * patch * channels].
        rows: patches over each other.
        columns: patches side by side.
        patch: pixels of a patch's side.

    Returns:
        [num_samples, channels, rows * patch, columns * patch].
    """
    patches = tokens.reshape(len(tokens), rows, columns, patch, patch, -1)
    images = torch.einsum("nhwpqc->nchpwq", patches)
    return images.reshape(len(tokens), -1, rows * patch, columns * patch)
