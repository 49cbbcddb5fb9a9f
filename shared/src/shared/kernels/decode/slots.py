"""Where each new token reads and writes keys and values."""

from typing import NamedTuple

from torch import Tensor

__all__ = ["Places"]


class Places(NamedTuple):
    """What each place reads, int64 [places] each.

    Attributes:
        slots: rows of `own`; each in at most one place.
        prompts: rows of `prompt`.
        prompt_lengths: positions of the prompt that are looked at; none for a row to fill up with.
        made: positions of `own` that are filled; the new key and value come after them.
    """

    slots: Tensor
    prompts: Tensor
    prompt_lengths: Tensor
    made: Tensor
