"""Choices of strategies, layer by layer, compiled."""

# ruff: noqa: ANN001, ANN201, ANN202
from __future__ import annotations

import numpy as np

from shared.kernels.jit import compiled

__all__ = ["find_cheapest", "price_to_go"]


@compiled
def price_to_go(cost, change, to_go, after):
    """What the layers after each one cost at least.

    Args:
        cost: of a layer under a strategy [layer, strategy].
        change: from one strategy to the next layer's [strategy, strategy].
        to_go: written: least cost of all later layers [layer, strategy].
        after: written: strategy of the next layer at that cost [layer, strategy].
    """
    layers, count = cost.shape
    to_go[layers - 1] = 0.0
    for layer in range(layers - 2, -1, -1):
        later = cost[layer + 1] + to_go[layer + 1]
        for s in range(count):
            best, at = np.inf, 0
            for t in range(count):
                value = change[s, t] + later[t]
                if value < best:
                    best, at = value, t
            to_go[layer, s], after[layer, s] = best, at


@compiled
def _grown(values, size):
    if size <= values.size:
        return values
    larger = np.empty(max(size, 2 * values.size), values.dtype)
    larger[: values.size] = values
    return larger


@compiled
def find_cheapest(seconds, memory, change_s, limit, bounds, multipliers, to_go, cutoff, most):
    """The fastest choice of strategies within a limit of memory, if one keeps to a cutoff.

    Args:
        seconds: of a layer under a strategy [layer, strategy].
        memory: of a layer under a strategy [layer, strategy].
        change_s: from one strategy to the next layer's [strategy, strategy].
        limit: most memory.
        bounds: least seconds + multiplier x memory of all later layers [multiplier, layer, strategy].
        multipliers: seconds for a unit of memory [multiplier].
        to_go: least memory of all later layers [layer, strategy].
        cutoff: most seconds.
        most: partial choices that are kept of a layer and strategy, evenly drawn; at least 2.

    Returns:
        A strategy for each layer; empty if none was found that keeps to the cutoff.
    """
    layers, count = seconds.shape
    # Partial choices: (memory, seconds) that no other of the same layer and strategy beats in both,
    # by rising memory, those of layer l and strategy s from first[l, s] to first[l, s + 1].
    held, taken_s = np.empty(1024, np.int64), np.empty(1024)
    parent = np.empty(1024, np.int64)
    first = np.zeros((layers, count + 1), np.int64)
    more, more_s = np.empty(1024, np.int64), np.empty(1024)
    origin = np.empty(1024, np.int64)
    size = 0
    for layer in range(layers):
        for s in range(count):
            first[layer, s] = size
            found = 0
            used, own_s = memory[layer, s], seconds[layer, s]
            room = limit - used - to_go[layer, s]
            # The strategies before; a single one, of which nothing is held, before the first layer.
            for t in range(count if layer > 0 else 1):
                begin, end, change = 0, 1, 0.0
                if layer > 0:
                    begin, end = first[layer - 1, t], first[layer - 1, t + 1]
                    change = change_s[t, s]
                more = _grown(more, found + end - begin)
                more_s = _grown(more_s, found + end - begin)
                origin = _grown(origin, found + end - begin)
                for i in range(begin, end):
                    before = held[i] if layer > 0 else 0
                    if before > room:
                        break
                    now_s = (taken_s[i] if layer > 0 else 0.0) + change + own_s
                    left = limit - before - used
                    is_kept = True
                    for k in range(multipliers.size):
                        if not now_s + bounds[k, layer, s] - multipliers[k] * left <= cutoff:
                            is_kept = False
                            break
                    if is_kept:
                        more[found], more_s[found], origin[found] = before + used, now_s, i
                        found += 1
            held = _grown(held, size + found)
            taken_s = _grown(taken_s, size + found)
            parent = _grown(parent, size + found)
            start = size
            for i in np.argsort(more[:found]):
                if size > start and more_s[i] >= taken_s[size - 1]:
                    continue
                if size > start and more[i] == held[size - 1]:
                    size -= 1
                held[size], taken_s[size], parent[size] = more[i], more_s[i], origin[i]
                size += 1
            if size - start > most:
                for i in range(most):
                    drawn = start + i * (size - start - 1) // (most - 1)
                    held[start + i], taken_s[start + i] = held[drawn], taken_s[drawn]
                    parent[start + i] = parent[drawn]
                size = start + most
        first[layer, count] = size
    begin = first[layers - 1, 0]
    if size == begin:
        return np.empty(0, np.int64)
    at = begin + taken_s[begin:size].argmin()
    choice = np.empty(layers, np.int64)
    for layer in range(layers - 1, -1, -1):
        choice[layer] = np.searchsorted(first[layer], at, side="right") - 1
        at = parent[at]
    return choice
