"""Hosts, their devices, and the links inside and between them.

Ranks number the devices host by host. Two hosts are joined by the `network` link unless `links` has
one for the pair. A cluster is written in YAML or found by `Cluster.detect`; link speeds are never
guessed from a device's name: measure them and use `fit_link`.
"""

from __future__ import annotations

import os
import socket
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import yaml

from shared.errors import TopologyError
from shared.files import read_text
from shared.topology.device import CPU, PRESETS, Device
from shared.topology.link import Link
from shared.units import GB, Gbps, parse_rate

__all__ = ["Cluster", "Host"]

# Unmeasured defaults: memory-bound copies inside a host, 10 Gbit/s Ethernet between hosts.
_LOCAL = Link.from_rate(10.0 * GB, alpha_s=1e-5)
_NETWORK = Link.from_rate(10.0 * Gbps, alpha_s=5e-5)


@dataclass(frozen=True, kw_only=True, slots=True)
class Host:
    """A machine and its devices.

    Attributes:
        name: unique in the cluster.
        devices: one for each rank that it can run.
        link: link between any two of its devices.

    Raises:
        TopologyError: there is no device.
    """

    name: str
    devices: tuple[Device, ...]
    link: Link = _LOCAL

    def __post_init__(self) -> None:
        if not self.devices:
            raise TopologyError(f"host {self.name!r} has no devices; leave it out of the cluster")


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """Hosts and the links between them.

    Attributes:
        hosts: hosts in rank order.
        network: link between two hosts for which `links` has no entry.
        links: links by pair of host names, in either order.

    Raises:
        TopologyError: there is no host, two have the same name, or a pair in `links` is not of two
            different hosts.
    """

    hosts: tuple[Host, ...]
    network: Link = _NETWORK
    links: Mapping[tuple[str, str], Link] = field(default_factory=dict)
    _ends: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        names = [host.name for host in self.hosts]
        if not names or len(set(names)) != len(names):
            raise TopologyError(f"a cluster needs hosts with names of their own, got {names}")
        for pair in self.links:
            if not set(pair) <= set(names) or pair[0] == pair[1]:
                raise TopologyError(
                    f"links[{pair}]: expected two different hosts of {names}; set the link inside "
                    f"a host as that host's `link`"
                )
        ends = tuple(accumulate(len(host.devices) for host in self.hosts))
        object.__setattr__(self, "_ends", ends)

    @classmethod
    def uniform(
        cls,
        num_hosts: int,
        devices_per_host: int,
        device: Device,
        *,
        local: Link = _LOCAL,
        network: Link = _NETWORK,
    ) -> Cluster:
        """Equal hosts "host0", "host1", ... with equal devices.

        Raises:
            TopologyError: if a number is below one.
        """
        hosts = (
            Host(name=f"host{index}", devices=(device,) * devices_per_host, link=local)
            for index in range(num_hosts)
        )
        return cls(hosts=tuple(hosts), network=network)

    @property
    def num_ranks(self) -> int:
        """Number of devices."""
        return self._ends[-1]

    def host(self, rank: int) -> Host:
        """The host that holds a rank.

        Raises:
            TopologyError: if there is no such rank.
        """
        return self.hosts[self._host_index(rank)]

    def device(self, rank: int) -> Device:
        """The device of a rank.

        Raises:
            TopologyError: if there is no such rank.
        """
        index = self._host_index(rank)
        # Counted back from the host's last device.
        return self.hosts[index].devices[rank - self._ends[index]]

    def link(self, rank_a: int, rank_b: int) -> Link:
        """The link between two ranks; of zero cost from a rank to itself.

        Raises:
            TopologyError: if there is no such rank.
        """
        host_a, host_b = self.host(rank_a), self.host(rank_b)
        if rank_a == rank_b:
            return Link(alpha_s=0.0, beta_s_per_byte=0.0)
        if host_a.name == host_b.name:
            return host_a.link
        own = self.links.get((host_a.name, host_b.name))
        return own or self.links.get((host_b.name, host_a.name), self.network)

    def to_yaml(self, path: Path | None = None) -> str:
        """The cluster as YAML text, also written to `path` if given."""
        tree = {
            "hosts": [
                {
                    "name": host.name,
                    "link": asdict(host.link),
                    "devices": [_written_device(device) for device in host.devices],
                }
                for host in self.hosts
            ],
            "network": asdict(self.network),
            "links": [{"hosts": list(pair), **asdict(link)} for pair, link in self.links.items()],
        }
        text = yaml.safe_dump(tree, sort_keys=False)
        if path is not None:
            path.write_text(text)
        return text

    @classmethod
    def from_yaml(cls, source: str | Path) -> Cluster:
        """Read a cluster from YAML, as written by `to_yaml` or by hand.

        A device is the name of a preset, perhaps with a count ("H100 x 8"), or a mapping of
        Device's fields, of which those left out are the preset's that `like` names. A link is a mapping of `alpha_s` (0 by default) and either
        `beta_s_per_byte` or `rate` ("100gbit").

        Args:
            source: a `Path` to a file, or YAML text.

        Raises:
            TopologyError: if a key is missing, unknown or has a bad value; the message gives its
                path.
            DataError: if there is no such file, or it is empty or no text.
        """
        text = read_text(source, "a cluster as YAML") if isinstance(source, Path) else source
        try:
            tree = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise TopologyError(f"a cluster must be YAML: {error}") from error
        _check_keys(tree, "cluster", required={"hosts"}, optional={"network", "links"})
        hosts = tuple(
            _read_host(host, f"hosts[{index}]")
            for index, host in enumerate(_checked_list(tree["hosts"], "hosts"))
        )
        links = {}
        for index, entry in enumerate(_checked_list(tree.get("links", []), "links")):
            path = f"links[{index}]"
            if not isinstance(entry, dict) or len(entry.get("hosts", [])) != 2:
                raise TopologyError(f"{path}.hosts: expected two host names, got {entry!r}")
            first, second = entry["hosts"]
            rest = {key: value for key, value in entry.items() if key != "hosts"}
            links[first, second] = _read_link(rest, path)
        network = _read_link(tree["network"], "network") if "network" in tree else _NETWORK
        return cls(hosts=hosts, network=network, links=links)

    @classmethod
    def detect(cls) -> Cluster:
        """This machine's devices; under torchrun, as many equal hosts as the world has.

        The links are assumptions (10 GB/s inside a host, 10 Gbit/s between hosts): measure them.

        Raises:
            TopologyError: if a GPU matches no preset, or torchrun's numbers contradict each other.
        """
        world_size = int(os.environ.get("WORLD_SIZE", "0"))
        local_size = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
        devices = _detected_devices(local_size)
        if not world_size:
            return cls(hosts=(Host(name=socket.gethostname(), devices=devices),))
        if local_size < 1 or world_size % local_size:
            raise TopologyError(
                f"WORLD_SIZE={world_size} is no multiple of LOCAL_WORLD_SIZE={local_size}; "
                f"describe unequal hosts in YAML"
            )
        hosts = (
            Host(name=f"host{index}", devices=devices) for index in range(world_size // local_size)
        )
        return cls(hosts=tuple(hosts))

    def _host_index(self, rank: int) -> int:
        if not 0 <= rank < self.num_ranks:
            raise TopologyError(f"this cluster has ranks 0..{self.num_ranks - 1}, not {rank}")
        return bisect_right(self._ends, rank)


def _detected_devices(local_size: int) -> tuple[Device, ...]:
    import torch

    num_gpus = torch.cuda.device_count()
    if num_gpus and num_gpus >= local_size:
        names = [torch.cuda.get_device_name(index) for index in range(local_size or num_gpus)]
        return tuple(_known_gpu(name, index) for index, name in enumerate(names))
    ranks = local_size or 1
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // ranks
    return (replace(CPU, memory_bytes=memory_bytes),) * ranks


def _known_gpu(name: str, index: int) -> Device:
    words = name.replace("-", " ").split()
    for preset in PRESETS.values():
        model, _, memory = preset.name.partition("_")
        if model in words and (not memory or any(memory in word for word in words)):
            return preset
    raise TopologyError(
        f"device {index} is {name!r}, for which there is no preset ({', '.join(PRESETS)}); "
        f"describe it in YAML and use Cluster.from_yaml"
    )


def _written_device(device: Device) -> Any:
    return device.name if PRESETS.get(device.name) == device else asdict(device)


def _read_host(tree: Any, path: str) -> Host:
    _check_keys(tree, path, required={"name", "devices"}, optional={"link"})
    devices: list[Device] = []
    for index, entry in enumerate(_checked_list(tree["devices"], f"{path}.devices")):
        devices += _read_devices(entry, f"{path}.devices[{index}]")
    link = _read_link(tree["link"], f"{path}.link") if "link" in tree else _LOCAL
    return Host(name=str(tree["name"]), devices=tuple(devices), link=link)


def _read_devices(entry: Any, path: str) -> list[Device]:
    if isinstance(entry, str):
        name, _, count = (part.strip() for part in entry.partition(" x "))
        if name not in PRESETS or (count and not count.isdigit()):
            raise TopologyError(
                f"{path}: expected one of {', '.join(PRESETS)}, perhaps ' x ' and a count, or a "
                f"mapping, got {entry!r}"
            )
        return [PRESETS[name]] * int(count or 1)
    optional = {"int8_ops_per_s", "fp8_flops_per_s"}
    required = {item.name for item in fields(Device)} - optional
    if isinstance(entry, dict) and "like" in entry:
        entry = _fill_in(entry, path)
    _check_keys(entry, path, required=required, optional=optional)
    try:
        # float(), because YAML reads 1e12 as text: its floats need a decimal point.
        device = Device(
            name=str(entry["name"]),
            kind=entry["kind"],
            flops_per_s=float(entry["flops_per_s"]),
            flops_fp32_per_s=float(entry["flops_fp32_per_s"]),
            memory_bytes=int(float(entry["memory_bytes"])),
            memory_bytes_per_s=float(entry["memory_bytes_per_s"]),
            **{key: _optional_float(entry.get(key)) for key in optional},
        )
    except (TypeError, ValueError) as error:
        raise TopologyError(f"{path}: {error}") from error
    return [device]


def _fill_in(entry: dict[str, Any], path: str) -> dict[str, Any]:
    """A device's keys over those of the preset that it is like."""
    if entry["like"] not in PRESETS:
        raise TopologyError(
            f"{path}.like: expected one of {', '.join(PRESETS)}, got {entry['like']!r}"
        )
    own = {key: value for key, value in entry.items() if key != "like"}
    return asdict(PRESETS[entry["like"]]) | own


def _optional_float(value: Any) -> float | None:
    return None if value is None else float(value)


def _read_link(tree: Any, path: str) -> Link:
    speed = "rate" if isinstance(tree, dict) and "rate" in tree else "beta_s_per_byte"
    _check_keys(tree, path, required={speed}, optional={"alpha_s"})
    try:
        alpha_s = float(tree.get("alpha_s", 0.0))
        if speed == "rate":
            return Link.from_rate(parse_rate(str(tree["rate"])), alpha_s=alpha_s)
        return Link(alpha_s=alpha_s, beta_s_per_byte=float(tree[speed]))
    except (TypeError, ValueError) as error:
        raise TopologyError(f"{path}: {error}") from error


def _check_keys(tree: Any, path: str, *, required: set[str], optional: set[str]) -> None:
    if not isinstance(tree, dict):
        raise TopologyError(f"{path}: expected a mapping, got {tree!r}")
    if not required <= tree.keys() <= required | optional:
        raise TopologyError(
            f"{path}: expected the keys {sorted(required)} and perhaps {sorted(optional)}, got "
            f"{sorted(map(str, tree))}"
        )


def _checked_list(tree: Any, path: str) -> list:
    if not isinstance(tree, list):
        raise TopologyError(f"{path}: expected a list, got {tree!r}")
    return tree
