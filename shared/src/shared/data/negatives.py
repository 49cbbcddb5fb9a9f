"""Shared parts of drawing negative destinations: kinds, random words by event, searches by time.

Kinds after Poursafaei et al., "Towards Better Evaluation for Dynamic Link Prediction" (arXiv
2207.10128). Which destinations are candidates is each package's own: a stream is known in advance or
grows, and destinations met at the event's own time are left out or not.
"""

from typing import Literal

import numpy as np
import torch
from jaxtyping import Int64
from torch import Tensor

from shared.kernels.philox import philox

__all__ = ["Kind", "draw_words", "first_not_before"]

Kind = Literal["random", "historical", "inductive"]


def draw_words(
    eid: Int64[Tensor, " num_events"], num_draws: int, key: int
) -> Int64[Tensor, "num_events {num_draws} 4"]:
    """Four random words for each draw of each event.

    A word depends on the key, the event's id and the number of the draw alone, so that draws are the
    same in any batches.

    Args:
        eid: ids of the events, 0 or more.
        num_draws: an event.
        key: the stream of random numbers, of `shared.kernels.philox.stream_key`.

    Returns:
        Words in [0, 2^32).
    """
    ids = eid[:, None].expand(-1, num_draws)
    draws = torch.arange(num_draws).expand(len(eid), -1)
    counter = [ids & 0xFFFFFFFF, ids >> 32, draws, torch.zeros_like(draws)]
    return philox(torch.stack(counter, -1), key)


def first_not_before(
    times: np.ndarray, begin: np.ndarray, end: np.ndarray, bound: np.ndarray
) -> np.ndarray:
    """The first place of each range whose time is not before the range's bound, by bisection.

    Args:
        times: [num_places], never falling within a range.
        begin: int64 [num_ranges], first place of each range.
        end: int64 [num_ranges], the place after its last.
        bound: [num_ranges], of a type that compares with `times`.

    Returns:
        int64 [num_ranges]; `end` where all times are before the bound.
    """
    low, high = begin.copy(), end.copy()
    while (low < high).any():
        middle = (low + high) // 2
        is_open = low < high
        is_before = is_open & (times[np.minimum(middle, len(times) - 1)] < bound)
        low = np.where(is_before, middle + 1, low)
        high = np.where(is_open & ~is_before, middle, high)
    return low
