"""The cluster as the search sees it, and the shares of its peak rates that programs achieve.

All devices, hosts and links inside hosts must be equal, so that a model's time on n GPUs does not
depend on which ones. The network link is per host: all devices of a host share it, as on machines
with one network card.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from shared.errors import ConfigError, TopologyError
from shared.topology import Cluster, Device, Link

__all__ = ["Efficiency", "Hardware"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Efficiency:
    """Achieved shares of peak rates, and overheads; may be replaced by measured ones.

    Attributes:
        training: share of the matrix peak, without communication. Large dense matrix products in
            mixed precision reach 0.6 to 0.7; norms, attention and the optimizer reduce it to half.
        inference: share of the matrix peak in forward passes and prefill, as in training.
        memory_bandwidth: share of the memory's rate in reading weights and caches. Streaming
            kernels reach 0.85 to 0.9, attention over a paged cache less.
        memory: share of the capacity for weights, states, activations and caches; the rest is for
            the runtime, buffers of collectives and fragmentation.
        decode_step_s: seconds of host work per decode step: launches of some hundred kernels.
        decode_sequence_s: seconds of host work per sequence of a decode step: scheduling, sampling
            and extending its cache.
    """

    training: float = 0.5
    inference: float = 0.5
    memory_bandwidth: float = 0.8
    memory: float = 0.9
    decode_step_s: float = 2e-3
    decode_sequence_s: float = 2e-5

    def __post_init__(self) -> None:
        for item in fields(self)[:4]:
            value = getattr(self, item.name)
            if not 0 < value <= 1:
                raise ConfigError(
                    f"efficiency.{item.name}: expected a share in (0, 1], got {value}"
                )
        for item in fields(self)[4:]:
            value = getattr(self, item.name)
            if not value >= 0:
                raise ConfigError(f"efficiency.{item.name}: expected seconds >= 0, got {value}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Hardware:
    """Equal hosts of equal devices.

    Attributes:
        num_hosts: number of hosts.
        devices_per_host: GPUs per host.
        device: the type of every GPU.
        local: link between two GPUs of a host.
        network: link of a host to all others.
    """

    num_hosts: int
    devices_per_host: int
    device: Device
    local: Link
    network: Link

    @classmethod
    def of(cls, cluster: Cluster) -> Hardware:
        """Reads the equal hosts, devices and links of a cluster.

        Raises:
            TopologyError: hosts, devices or links differ.
        """
        first = cluster.hosts[0]
        device = first.devices[0]
        expected = (first.link, (device,) * len(first.devices))
        for host in cluster.hosts:
            if (host.link, host.devices) != expected:
                raise TopologyError(
                    f"expected hosts like {first.name!r}, with {len(first.devices)} x "
                    f"{device.name}, but {host.name!r} differs; describe the cluster by its "
                    "slowest device and link, or map its equal hosts only"
                )
        for pair, link in cluster.links.items():
            if link != cluster.network:
                raise TopologyError(
                    f"expected one network link, but {pair} have their own; describe the "
                    "cluster by its slowest one"
                )
        return cls(
            num_hosts=len(cluster.hosts),
            devices_per_host=len(first.devices),
            device=device,
            local=first.link,
            network=cluster.network,
        )

    @property
    def num_gpus(self) -> int:
        """Number of GPUs of all hosts."""
        return self.num_hosts * self.devices_per_host

    def set_sizes(self) -> list[int]:
        """Allowed numbers of GPUs of a set of models, ascending.

        Whole hosts, or a host repeatedly divided by its smallest prime factor (4, 2 and 1 of 8).
        Within a host each size divides the next, so that sets placed by descending size always fit:
        no set of part of a host spans two hosts, or shares one with a set of several hosts.
        """
        sizes = [self.devices_per_host * hosts for hosts in range(self.num_hosts, 0, -1)]
        while sizes[-1] > 1:
            size = sizes[-1]
            factor = next(f for f in range(2, size + 1) if size % f == 0)
            sizes.append(size // factor)
        return sizes[::-1]

    def ring(self, num_ranks: int, stride: int, per_host: int | None = None) -> Link:
        """The slowest link of a ring, when all ranks of the set are in such rings at once.

        Args:
            num_ranks: ranks of the ring.
            stride: difference of two neighbours' rank numbers.
            per_host: ranks of the ring in each host; derived from the stride when not given.
        """
        if num_ranks * stride <= self.devices_per_host:
            return self.local
        per_host = per_host or max(1, self.devices_per_host // stride)
        sharing = self.devices_per_host / per_host
        beta = float(self.network.beta_s_per_byte) * sharing
        return Link(
            alpha_s=self.network.alpha_s,
            beta_s_per_byte=max(beta, float(self.local.beta_s_per_byte)),
        )
