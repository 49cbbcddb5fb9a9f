"""Seconds and bytes of spans of layers and of messages, read off a profile and a cluster."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from diffusionpipe.planner.fill import FrozenCost
from diffusionpipe.planner.partitioning.partition import sum_spans
from diffusionpipe.planner.traffic import find_feeds
from shared.topology import Cluster, Link
from shared.topology.cost import ring_all_reduce_s

if TYPE_CHECKING:
    from diffusionpipe.planner.plan import Plan
    from diffusionpipe.profiler.job_profile import JobProfile

__all__ = ["ChainCosts", "PlanInputs"]

# Bytes of AdamW's two moments for each byte of trained weights.
_OPTIMIZER_FACTOR = 2


class ChainCosts:
    """Costs of one backbone's layers. Tables are [i, j], of layers i to j.

    Args:
        profile: measured figures.
        backbone: index of the backbone.
    """

    def __init__(self, profile: JobProfile, backbone: int) -> None:
        self.chain = profile.chains[backbone]
        self.num_layers = len(self.chain.layers)
        self._profile = profile
        self._seconds: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    def layer_seconds(self, rows: int) -> tuple[np.ndarray, np.ndarray]:
        """Forward and backward seconds by layer of so many samples on one device [layer]."""
        if rows not in self._seconds:
            forward_s, backward_s = (
                np.array([self._profile.seconds(row, rows) for row in table])
                for table in (self.chain.forward_s, self.chain.backward_s)
            )
            self._seconds[rows] = forward_s, backward_s
        return self._seconds[rows]

    def span_seconds(self, span: tuple[int, int], rows: int) -> tuple[float, float]:
        """Forward and backward seconds of a span of layers."""
        forward_s, backward_s = self.layer_seconds(rows)
        own = slice(*span)
        return float(forward_s[own].sum()), float(backward_s[own].sum())

    def time_table(self, rows: int) -> tuple[np.ndarray, np.ndarray]:
        """Seconds of all passes, and of the backward pass.

        Steps that predict twice with some probability count with their expected forward time.
        """
        forward_s, backward_s = self.layer_seconds(rows)
        backward = sum_spans(backward_s)
        return sum_spans(forward_s * (1 + self._profile.self_conditioning)) + backward, backward

    @cached_property
    def gradient_table(self) -> np.ndarray:
        """Bytes of trained weights."""
        return sum_spans(self.chain.gradient_bytes)

    @cached_property
    def sum_bytes(self) -> tuple[int, ...]:
        """Bytes by layer of the sums of gradients, which are float32 at least."""
        return self.chain.sum_bytes or self.chain.gradient_bytes

    @cached_property
    def sum_table(self) -> np.ndarray:
        """Bytes of sums of gradients."""
        return sum_spans(self.sum_bytes)

    @cached_property
    def fixed_table(self) -> np.ndarray:
        """Bytes of weights, sums of gradients, optimizer state and, if narrower, the step's gradients."""
        layers = zip(self.sum_bytes, self.chain.gradient_bytes, strict=True)
        state = [wide + (_OPTIMIZER_FACTOR + (wide > own)) * own for wide, own in layers]
        return sum_spans(self.chain.parameter_bytes) + sum_spans(state)

    @cached_property
    def saved_table(self) -> np.ndarray:
        """Bytes a sample that are kept for the backward pass."""
        return sum_spans(self.chain.saved_bytes)

    @cached_property
    def outputs_table(self) -> np.ndarray:
        """Frozen outputs that are needed, as bits in the order of the profile's."""
        chain, number = self.chain, {name: i for i, name in enumerate(self._profile.frozen_bytes)}
        layers = [(layer, layer + 1) for layer in range(self.num_layers)]
        feeds = find_feeds(chain.reads, chain.writes, layers, chain.feeds)
        table = np.zeros((self.num_layers + 1,) * 2, np.int64)
        for j, names in enumerate(feeds):
            own = sum(1 << number[name] for name in names if name in number)
            table[: j + 1, j + 1 :] |= own
        return table

    @cached_property
    def traffic_table(self) -> np.ndarray:
        """Bytes a sample between layers i to j and those around them, in the busier direction.

        Values in and the gradients of values out share a direction of the link.
        """
        chain, size = self.chain, self.num_layers + 1
        firsts, stops = np.arange(size)[:, None], np.arange(size)[None, :]
        received, sent = np.zeros((size, size)), np.zeros((size, size))
        for writer, keys in enumerate(chain.writes):
            for key in keys:
                readers = [layer for layer, own in enumerate(chain.reads) if key in own]
                if not readers:
                    continue
                count = np.searchsorted(readers, np.arange(size))
                num_bytes = chain.value_bytes[key]
                back = num_bytes * (key in chain.differentiable)
                comes_in = (writer < firsts) & (count[None, :] > count[:, None])
                goes_out = (firsts <= writer) & (writer < stops) & (readers[-1] >= stops)
                received += num_bytes * comes_in + back * goes_out
                sent += num_bytes * goes_out + back * comes_in
        return np.where(firsts < stops, np.maximum(received, sent), 0.0)


@dataclass(frozen=True)
class PlanInputs:
    """A job's profile and the cluster to plan for.

    Attributes:
        profile: measured figures.
        cluster: ranks and links.
    """

    profile: JobProfile
    cluster: Cluster

    @cached_property
    def costs(self) -> tuple[ChainCosts, ...]:
        """Costs of each backbone."""
        return tuple(ChainCosts(self.profile, index) for index in range(len(self.profile.chains)))

    @cached_property
    def memory_bytes(self) -> list[int]:
        """Memory of each rank's device."""
        return [self.cluster.device(rank).memory_bytes for rank in range(self.cluster.num_ranks)]

    @cached_property
    def output_bytes(self) -> np.ndarray:
        """Bytes a sample of each frozen output."""
        return np.array(list(self.profile.frozen_bytes.values()), dtype=float)

    def count_output_bytes(self, outputs: np.ndarray) -> np.ndarray:
        """Bytes a sample of frozen outputs given as bits."""
        return sum(
            (
                num_bytes * (outputs >> number & 1)
                for number, num_bytes in enumerate(self.output_bytes)
            ),
            np.zeros(outputs.shape),
        )

    def list_frozen_costs(self, num_samples: int) -> list[FrozenCost]:
        """Seconds of each frozen component by number of samples encoded at once.

        Args:
            num_samples: most samples to encode; no more at once than were measured.
        """
        return [each._replace(seconds=each.seconds[: num_samples + 1]) for each in self._frozen]

    @cached_property
    def _frozen(self) -> list[FrozenCost]:
        counts = range(1, self.profile.sizes[-1] + 1)
        return [
            FrozenCost(
                name,
                [0.0, *np.maximum.accumulate(
                    [self.profile.seconds(row, count) for count in counts]
                ).tolist()],
            )
            for name, row in self.profile.frozen_s.items()
        ]  # fmt: skip

    def find_frozen_s(self, num_samples: int) -> float:
        """Seconds of all frozen components on one device."""
        return sum(each.time_s(num_samples) for each in self.list_frozen_costs(num_samples))

    def find_update_s(self, plan: Plan, rank: int) -> float:
        """Seconds of a rank's optimizer step."""
        trained_bytes = sum(
            float(self.costs[plan.backbones[stage]].gradient_table[plan.spans[stage]])
            for stage in plan.stages_of(rank)
        )
        return trained_bytes * self.profile.step_s_per_byte

    def find_ring_link(self, ranks: Sequence[int]) -> Link:
        """The slowest link of a ring of ranks."""
        ring = zip(ranks, [*ranks[1:], ranks[0]], strict=True)
        return max((self.cluster.link(*pair) for pair in ring), key=_time_megabyte)

    def find_sync_s(self, num_bytes: Any, ranks: Sequence[int]) -> Any:
        """Seconds of a sum of gradients over ranks; an array for an array of bytes."""
        if len(ranks) == 1:
            return 0.0 * num_bytes
        link = self.find_ring_link(ranks)
        latency_s = ring_all_reduce_s(link, 0, len(ranks))
        per_byte_s = (ring_all_reduce_s(link, 1_000_000, len(ranks)) - latency_s) / 1_000_000
        return (num_bytes > 0) * latency_s + num_bytes * per_byte_s

    def find_link_s(self, devices: Sequence[Sequence[int]], num_bytes: np.ndarray) -> np.ndarray:
        """Seconds of a micro-batch's messages of one replica, while all replicas send.

        Args:
            devices: ranks of neighbouring stages, equally many in each.
            num_bytes: bytes of the messages of one replica.
        """
        neighbours = itertools.pairwise(devices)
        pairs = [pair for both in neighbours for pair in zip(*both, strict=True)]
        link = max((self.cluster.link(*pair) for pair in pairs), key=_time_megabyte)
        # Messages of ranks of one host to other hosts take turns.
        leaving: dict[str, int] = {}
        for source, target in pairs:
            host = self.cluster.host(source).name
            leaving[host] = leaving.get(host, 0) + (self.cluster.host(target).name != host)
        share = max(1, max(leaving.values()) // (len(devices) - 1))
        seconds = 2 * float(link.alpha_s) + share * num_bytes * float(link.beta_s_per_byte)
        return np.where(num_bytes > 0, seconds, 0.0)


def _time_megabyte(link: Link) -> float:
    return float(link.time_s(1_000_000))
