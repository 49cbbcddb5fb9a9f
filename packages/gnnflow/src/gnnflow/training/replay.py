"""Which past events are trained on again with an increment.

`UniformReplay` is what GNNFlow's continual loop does: a share of all past events, drawn with
replacement, in order of time, before the new ones.

`StructureReplay` takes an idea from the abstract of SEA-ER (Su and Wu, "Towards Robust Inductive Graph
Incremental Learning via Experience Replay", 2023): as a graph grows, neighbourhoods change their
shape, and weighting past examples by importance makes up for that. Here the structure of an event is
the degree of either end just before it, in powers of two, and its importance is the ratio of the
increment's histogram over that to the past's; events are drawn by it. It is not SEA-ER: that is for
nodes with labels, keeps a buffer chosen by the graph's topology, and has a guarantee; this is for
events, draws from all of the past, and promises nothing.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Int64
from torch import Tensor

from shared.data.events import Events
from shared.errors import ConfigError
from shared.kernels.philox import stream_key

__all__ = ["DegreeClasses", "ReplayPolicy", "StructureReplay", "UniformReplay"]

_NUM_LEVELS = 64


@runtime_checkable
class ReplayPolicy(Protocol):
    """What the continual loop asks of a policy."""

    def observe(self, events: Events) -> None:
        """Adds events, in the order of the stream; called for every event once."""
        ...

    def draw(self, first: int, end: int, round_index: int) -> Int64[Tensor, " num_drawn"]:
        """Ascending places in the stream, in [first, end), of events to train on again.

        Events from `end` on are the increment. The answer depends on what was observed and on the
        arguments alone.
        """
        ...


class UniformReplay:
    """Each past event alike, with replacement.

    Args:
        share: how many are drawn, over the number of past events.
        seed: of the draws.

    Raises:
        ConfigError: the share is negative or not finite.
    """

    def __init__(self, share: float = 0.05, *, seed: int = 0) -> None:
        self.share = _check_share(share)
        self.seed = seed

    def observe(self, events: Events) -> None:
        """Keeps nothing: every event is alike."""

    def draw(self, first: int, end: int, round_index: int) -> Int64[Tensor, " num_drawn"]:
        """See `ReplayPolicy.draw`."""
        random = _make_random(self.seed, round_index)
        num = int(self.share * (end - first))
        return torch.from_numpy(np.sort(random.integers(first, max(end, first + 1), num)))


class DegreeClasses:
    """Classes of events by the degrees of their ends, in powers of two, as a stream goes by."""

    def __init__(self) -> None:
        self._degree = np.zeros(0, np.int64)

    def classify(self, events: Events) -> np.ndarray:
        """Classifies the next events of the stream, and counts their edges.

        Returns:
            int16 [num_events]: bits of the source's degree just before the event, times 64, plus
            those of the destination's.
        """
        if events.num_nodes > len(self._degree):
            grown = np.zeros(max(events.num_nodes, 2 * len(self._degree)), np.int64)
            grown[: len(self._degree)] = self._degree
            self._degree = grown
        ends = torch.stack([events.src, events.dst], 1).reshape(-1).numpy()
        order = np.argsort(ends, kind="stable")
        ordered = ends[order]
        earlier = np.empty_like(ends)
        earlier[order] = np.arange(len(ends)) - np.searchsorted(ordered, ordered)
        # Between the two ends of one event nothing has happened.
        earlier = earlier.reshape(-1, 2)
        earlier[:, 1] -= events.src.numpy() == events.dst.numpy()
        degree = self._degree[ends.reshape(-1, 2)] + earlier
        level = np.frexp(degree.astype(np.float64))[1]
        self._degree += np.bincount(ends, minlength=len(self._degree))
        return (level[:, 0] * _NUM_LEVELS + level[:, 1]).astype(np.int16)


class StructureReplay:
    """Draws past events by degree class, so that classes are as frequent as in the increment.

    An event's probability is proportional to the increment's share of its degree class over the
    past's share of that class, mixed with a uniform one, so that every event can be drawn.

    Args:
        share: number of events drawn, as a share of past events.
        uniform: weight of the uniform probability, from 0 to 1.
        seed: seed of the draws.

    Raises:
        ConfigError: a share is out of range.
    """

    def __init__(self, share: float = 0.05, *, uniform: float = 0.2, seed: int = 0) -> None:
        if not 0 <= uniform <= 1:
            raise ConfigError(f"replay: expected uniform from 0 to 1, got {uniform}")
        self.share = _check_share(share)
        self.uniform = uniform
        self.seed = seed
        self._degrees = DegreeClasses()
        self._classes: list[np.ndarray] = []

    def observe(self, events: Events) -> None:
        """Classifies events by the degrees of their ends just before each of them."""
        self._classes.append(self._degrees.classify(events))

    def draw(self, first: int, end: int, round_index: int) -> Int64[Tensor, " num_drawn"]:
        """See `ReplayPolicy.draw`."""
        random = _make_random(self.seed, round_index)
        num = int(self.share * (end - first))
        if not num:
            return torch.empty(0, dtype=torch.int64)
        self._classes = [np.concatenate(self._classes)]
        past, new = self._classes[0][first:end], self._classes[0][end:]
        num_past = np.bincount(past, minlength=_NUM_LEVELS**2)
        num_new = np.bincount(new, minlength=_NUM_LEVELS**2) * (num_past > 0)
        chance = np.full(len(past), 1 / len(past))
        if num_new.any():
            share_new = num_new / num_new.sum()
            chance *= self.uniform
            chance += (1 - self.uniform) * (share_new / np.maximum(num_past, 1))[past]
        reached = np.cumsum(chance)
        drawn = np.searchsorted(reached, random.random(num) * reached[-1], "right")
        return torch.from_numpy(np.sort(first + np.minimum(drawn, len(past) - 1)))


def _check_share(share: float) -> float:
    if not 0 <= share < float("inf"):
        raise ConfigError(f"replay: expected a share of 0 or more, got {share}")
    return share


def _make_random(seed: int, round_index: int) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(stream_key(seed, round_index)))
