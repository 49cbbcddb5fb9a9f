"""Differences of floats in units in the last place, held in one byte."""

import torch
from torch import Tensor

__all__ = ["ESCAPE", "FARTHEST", "add_ulps", "ulps_between"]

# Units that a code tells at most, either way. Beyond are the ends of a byte, at which a processor that
# packs words into bytes puts all that lies farther.
FARTHEST = 126
# The code of a difference that does not fit into [-126, 126].
ESCAPE = -128

_WORDS = {torch.float32: torch.int32, torch.bfloat16: torch.int16}


def ulps_between(value: Tensor, guess: Tensor) -> Tensor:
    """How many units in the last place lie from `guess` away from zero to `value`, int8.

    `ESCAPE` stands where that does not fit, where the signs differ, and where the guess is NaN:
    which NaN an operation makes is nobody's to promise.

    Args:
        value: float32 or bfloat16.
        guess: Of the same type and shape.
    """
    off = _words(value) - _words(guess)
    fits = (off >= -FARTHEST) & (off <= FARTHEST) & ~guess.isnan()
    return torch.where(fits, off, ESCAPE).to(torch.int8)


def add_ulps(guess: Tensor, codes: Tensor) -> Tensor:
    """The values that `codes` were made of, bit for bit; without meaning where a code escapes."""
    return (_words(guess) + codes).to(_WORDS[guess.dtype]).view(guess.dtype)


def _words(values: Tensor) -> Tensor:
    # Within a sign floats sort as their bits do. Small differences that wrap are those of a NaN.
    return values.view(_WORDS[values.dtype]).to(torch.int32)
