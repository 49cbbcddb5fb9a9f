"""Bands of lengths, each served by copies of one shape of replica, compiled.

Arguments that all functions share: `work` seconds of all documents up to each length, a s^2 + b s each
[shape, length + 1]; `tokens` of them [length + 1]; `longest_s` seconds of one document of each length
[shape, length + 1]; `last` the number of lengths that a shape holds, `ranks` of a replica, `fixed_s`
seconds of any micro-batch, `caps` tokens in one, and `stages` [shape].
"""

# ruff: noqa: ANN001, ANN201, ANN202
from __future__ import annotations

import numpy as np

from shared.kernels.jit import compiled

__all__ = ["fill_bands", "spread_bands"]


@compiled
def _band_s(work, tokens, longest_s, fixed_s, caps, stages, k, low, high, copies):
    """Seconds of `copies` replicas of shape k for the lengths after `low` up to `high`."""
    alone = longest_s[k, high]
    held = copies * caps[k]
    micro_batches = max((tokens[high] - tokens[low] + held - 1) // held, 1)
    shared_s = max((work[k, high] - work[k, low]) / copies, alone)
    return shared_s + micro_batches * fixed_s[k] + (stages[k] - 1) * (alone + fixed_s[k])


@compiled
def fill_bands(
    work, tokens, longest_s, last, ranks, fixed_s, caps, stages, best, shape_of, copies_of, low_of
):
    """Least seconds of all lengths up to each, for each number of ranks.

    Args:
        work, tokens, longest_s, last, ranks, fixed_s, caps, stages: see the module.
        best: written: seconds [length + 1, rank + 1].
        shape_of: written: shape of the last band, -1 where a rank is left over [length + 1, rank + 1].
        copies_of: written: replicas of the last band [length + 1, rank + 1].
        low_of: written: lengths before the last band [length + 1, rank + 1].
    """
    size, num_ranks = best.shape[0] - 1, best.shape[1] - 1
    best[:] = np.inf
    best[0] = 0.0
    shape_of[:] = -1
    for high in range(1, size + 1):
        for k in range(ranks.size):
            if high > last[k]:
                continue
            for low in range(high):
                # With more copies the band takes less time and leaves fewer ranks to the others, and
                # where these two cross moves up with the ranks: one pass over ranks finds all.
                copies = 1
                band = _band_s(work, tokens, longest_s, fixed_s, caps, stages, k, low, high, 1)
                before = np.inf
                for n in range(ranks[k], num_ranks + 1):
                    while (copies + 1) * ranks[k] <= n and best[low, n - copies * ranks[k]] < band:
                        copies += 1
                        before = band
                        band = _band_s(
                            work, tokens, longest_s, fixed_s, caps, stages, k, low, high, copies
                        )
                    value = max(best[low, n - copies * ranks[k]], band)
                    chosen = copies
                    if copies > 1:
                        fewer = max(best[low, n - (copies - 1) * ranks[k]], before)
                        if fewer <= value:
                            value, chosen = fewer, copies - 1
                    if value < best[high, n]:
                        best[high, n], shape_of[high, n] = value, k
                        copies_of[high, n], low_of[high, n] = chosen, low
        for n in range(1, num_ranks + 1):
            if best[high, n - 1] <= best[high, n]:
                best[high, n], shape_of[high, n] = best[high, n - 1], -1


@compiled
def spread_bands(work, tokens, longest_s, last, fixed_s, caps, stages, kinds, copies):
    """Least seconds of all lengths up to each on given replicas, a band for each shape or none.

    Args:
        work, tokens, longest_s, last, fixed_s, caps, stages: see the module.
        kinds: shapes that there are [kind].
        copies: replicas of each [kind].

    Returns:
        Seconds, infinite where no replica holds the longest [length + 1].
    """
    size = tokens.size - 1
    best = np.full((1 << kinds.size, size + 1), np.inf)
    best[:, 0] = 0.0
    for used in range(1, 1 << kinds.size):
        for j in range(kinds.size):
            if not used >> j & 1:
                continue
            k, others = kinds[j], used ^ (1 << j)
            for high in range(1, size + 1):
                best[used, high] = min(best[used, high], best[others, high])
                if high > last[k]:
                    continue
                # A band that begins later takes less time and leaves more to the others.
                low, top = 0, high - 1
                while low < top:
                    middle = (low + top) // 2
                    band = _band_s(
                        work, tokens, longest_s, fixed_s, caps, stages, k, middle, high, copies[j]
                    )
                    if best[others, middle] < band:
                        low = middle + 1
                    else:
                        top = middle
                for at in range(max(low - 1, 0), low + 1):
                    band = _band_s(
                        work, tokens, longest_s, fixed_s, caps, stages, k, at, high, copies[j]
                    )
                    best[used, high] = min(best[used, high], max(best[others, at], band))
    return best[-1]
