"""Placement of ranks in a Ray cluster: a placement group with one bundle of resources per rank.

Ray blocks forever on resources that the cluster lacks or that others hold. Here missing resources
are refused at once and busy ones after `_WAIT_S`; the error says what was wanted and what is free.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import ray
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)

from shared.errors import ConfigError

__all__ = ["RankPlacement", "place_ranks"]

_WAIT_S = 8.0
"""Seconds to wait for resources that others hold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlacement:
    """The resources reserved for ranks.

    Attributes:
        group: Ray's placement group.
        cpus, gpus: of each rank.
        order: the group's bundle for each rank; bundles of one machine are adjacent.
    """

    group: PlacementGroup
    cpus: float
    gpus: float
    order: list[int]


def place_ranks(num_ranks: int | None, cpus: float, gpus: float | None) -> RankPlacement:
    """Reserves resources for ranks, on as few machines as possible.

    Args:
        num_ranks: number of ranks; when None, as many as all machines have resources for.
        cpus: CPUs for each rank.
        gpus: GPUs for each rank; when None, one if there are enough, else none.

    Raises:
        ConfigError: if resources are missing, or not free within `_WAIT_S`.
    """
    if gpus is None:
        gpus = int(ray.cluster_resources().get("GPU", 0) >= (num_ranks or 1))
    wanted = {"CPU": cpus, "GPU": gpus}
    bundle = {key: number for key, number in wanted.items() if number > 0}
    if (num_ranks is not None and num_ranks < 1) or not bundle:
        raise ConfigError(
            f"expected at least one rank, each with CPUs or GPUs above 0, got {num_ranks} ranks of "
            f"{_told(wanted)}"
        )
    num_places = _num_places(bundle)
    num_ranks = num_places if num_ranks is None else num_ranks
    is_possible = 0 < num_ranks <= num_places
    if is_possible:
        group = placement_group([bundle] * num_ranks, strategy="PACK")
        if group.wait(_WAIT_S):
            machine = placement_group_table(group)["bundles_to_node_id"]
            order = sorted(machine, key=lambda place: (machine[place], place))
            return RankPlacement(group=group, cpus=cpus, gpus=gpus, order=order)
        remove_placement_group(group)
    raise ConfigError(
        f"{num_ranks or 1} ranks want {_told(wanted)} each, and Ray's machines have places for "
        f"{num_places}: {_told(ray.cluster_resources())} in all, of which "
        f"{_told(ray.available_resources())} {f'were for {_WAIT_S:g} s' if is_possible else 'are'} "
        f"free. Start fewer ranks, ask for less a rank, or close what holds the rest"
    )


def _num_places(bundle: Mapping[str, float]) -> int:
    """How many such bundles all machines have resources for, whether in use or not."""
    machines = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    return sum(min(int(has.get(key, 0) // bundle[key]) for key in bundle) for has in machines)


def _told(resources: Mapping[str, float]) -> str:
    return " and ".join(f"{resources.get(key, 0):g} {key}s" for key in ("CPU", "GPU"))
