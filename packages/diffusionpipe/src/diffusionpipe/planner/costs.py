"""Seconds and bytes of spans of layers, read off a profile."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from diffusionpipe.planner.fill import FrozenCost
from diffusionpipe.planner.partitioning.partition import sum_spans

if TYPE_CHECKING:
    from diffusionpipe.profiler.job_profile import JobProfile

__all__ = ["ChainCosts", "list_frozen_costs"]

# Bytes of AdamW's two moments for each byte of trained weights.
_OPTIMIZER_FACTOR = 2


class ChainCosts:
    """Costs of one backbone's layers.

    Args:
        profile: measured figures.
        backbone: index of the backbone.
        fraction: probability that a step has a self-conditioning pass, whose expected forward time
            is added.
    """

    def __init__(self, profile: JobProfile, backbone: int = 0, fraction: float = 0.0) -> None:
        self.profile = profile
        self.chain = profile.chains[backbone]
        self.num_layers = len(self.chain.layers)
        self._fraction = fraction
        self._seconds: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    def layer_seconds(self, rows: int) -> tuple[np.ndarray, np.ndarray]:
        """Forward and backward seconds by layer of so many samples on one device [layer]."""
        if rows not in self._seconds:
            self._seconds[rows] = (
                np.array([self.profile.seconds(row, rows) for row in self.chain.forward_s]),
                np.array([self.profile.seconds(row, rows) for row in self.chain.backward_s]),
            )
        return self._seconds[rows]

    def span_seconds(self, span: tuple[int, int], rows: int) -> tuple[float, float]:
        """Forward and backward seconds of a span of layers."""
        forward_s, backward_s = self.layer_seconds(rows)
        own = slice(*span)
        return float(forward_s[own].sum()), float(backward_s[own].sum())

    def time_table(self, rows: int) -> tuple[np.ndarray, np.ndarray]:
        """Seconds of both passes, and of the backward pass, of layers i to j [i, j]."""
        forward_s, backward_s = self.layer_seconds(rows)
        backward = sum_spans(backward_s)
        return sum_spans(forward_s * (1 + self._fraction)) + backward, backward

    @cached_property
    def gradient_table(self) -> np.ndarray:
        """Bytes of gradients of layers i to j [i, j]."""
        return sum_spans(self.chain.gradient_bytes)

    @cached_property
    def fixed_table(self) -> np.ndarray:
        """Bytes of weights, gradients and optimizer state of layers i to j [i, j]."""
        return sum_spans(self.chain.parameter_bytes) + (1 + _OPTIMIZER_FACTOR) * self.gradient_table

    @cached_property
    def saved_table(self) -> np.ndarray:
        """Bytes a sample that layers i to j keep for their backward pass [i, j]."""
        return sum_spans(self.chain.saved_bytes)

    @cached_property
    def traffic_table(self) -> np.ndarray:
        """Bytes a sample that layers i to j send to the layers around them, or receive [i, j].

        Values in and the gradients of values out share a direction of the link, values out and the
        gradients of values in the other one; the larger of both counts.
        """
        layers = self.num_layers
        firsts, stops = np.arange(layers + 1)[:, None], np.arange(layers + 1)[None, :]
        received = np.zeros((layers + 1, layers + 1))
        sent = np.zeros((layers + 1, layers + 1))
        for key, writer, readers in list_values(self.chain.reads, self.chain.writes):
            count = np.searchsorted(readers, np.arange(layers + 1))
            num_bytes = self.chain.value_bytes[key]
            back = num_bytes * (key in self.chain.differentiable)
            comes_in = (writer < firsts) & (count[None, :] > count[:, None])
            goes_out = (firsts <= writer) & (writer < stops) & (readers[-1] >= stops)
            received += num_bytes * comes_in + back * goes_out
            sent += num_bytes * goes_out + back * comes_in
        return np.where(firsts < stops, np.maximum(received, sent), 0.0)


def list_values(
    reads: Sequence[Sequence[str]], writes: Sequence[Sequence[str]]
) -> list[tuple[str, int, list[int]]]:
    """Lists each value that a layer writes and another reads: key, writing layer, reading layers."""
    readers: dict[str, list[int]] = {}
    for layer, keys in enumerate(reads):
        for key in dict.fromkeys(keys):
            readers.setdefault(key, []).append(layer)
    return [
        (key, layer, readers[key])
        for layer, keys in enumerate(writes)
        for key in keys
        if key in readers
    ]


def list_frozen_costs(profile: JobProfile, num_samples: int) -> list[FrozenCost]:
    """Seconds of each frozen component by number of samples encoded at once.

    At most as many as the largest that was measured, or as there are.
    """
    most = min(profile.sizes[-1], num_samples)
    return [
        FrozenCost(
            name,
            [
                0.0,
                *np.maximum.accumulate(
                    [profile.seconds(row, count) for count in range(1, most + 1)]
                ).tolist(),
            ],
        )
        for name, row in profile.frozen_s.items()
    ]
