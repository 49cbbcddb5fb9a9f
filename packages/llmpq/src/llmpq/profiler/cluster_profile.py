"""The profile of a whole cluster: each kind of device measured on one of its ranks, once."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

from llmpq.config import Workload
from llmpq.profiler.cache import find_profile, profile_path
from llmpq.profiler.links import measure_links
from llmpq.profiler.profile import DeviceProfile, Profile
from shared.comms import Group, tree
from shared.errors import ConfigError
from shared.files import write_atomically
from shared.topology.cluster import Cluster
from shared.topology.link import Link

__all__ = ["merge_mappings", "profile_cluster"]

_LINK_S, _LINKS_S = 2.0, 30.0
"""Most seconds of measuring one link, and all."""


def profile_cluster(
    folder: str | Path,
    model: str | Path,
    cluster: Cluster,
    *,
    bits: Sequence[int],
    group_size: int,
    dtype: str,
    activations: str = "float",
    workload: Workload,
    force: bool = False,
    limit_s: float = 60.0,
    on_progress: Callable[[str], None] = lambda _: None,
) -> Profile | None:
    """Reads or measures the kinds of a cluster's devices.

    With ranks (under torchrun, one for each device of the cluster) the first rank of each kind
    measures where its own folder has no profile, all kinds at the same time, and then all pairs of
    ranks measure their links, which replace the cluster's. In one process what is
    missing is measured only if all devices are of this one's kind, which cannot be checked.

    Args:
        folder: where profiles are kept; rank 0 keeps those of all kinds.
        model: the Hugging Face model.
        cluster: devices in rank order, with the bytes that each may hold, and links.
        bits: widths that are needed.
        group_size: columns that share a scale.
        dtype: of activations.
        activations: what products may round them to, see `choose_forms`.
        workload: bounds batches and tokens that are measured.
        force: take profiles of another version of torch or processor as they are.
        limit_s: seconds that measuring a kind may take, once libraries are loaded.
        on_progress: called with what is being measured.

    Returns:
        The profile, on rank 0; None elsewhere.

    Raises:
        ConfigError: ranks and devices differ in number, a profile is missing and cannot be measured
            here, or is of something else.
    """
    kinds: dict[str, int] = {}
    for rank in range(cluster.num_ranks):
        kinds.setdefault(cluster.device(rank).name, rank)
    group = Group.world() if Group.exists() and Group.world().world_size > 1 else None
    if group is not None and group.world_size != cluster.num_ranks:
        raise ConfigError(
            f"expected a rank for each of the cluster's {cluster.num_ranks} devices, got "
            f"{group.world_size} ranks; start as many, or correct the cluster's file"
        )

    def find(kind: str) -> DeviceProfile:
        return find_profile(
            folder, model, kind, bits=bits, group_size=group_size, dtype=dtype,
            activations=activations, workload=workload,
            is_here=group is not None or len(kinds) == 1, force=force, limit_s=limit_s,
            on_progress=lambda what: on_progress(f"{kind}: {what}"),
        )  # fmt: skip

    def path_of(kind: str) -> Path:
        return profile_path(folder, model, kind, dtype, group_size, activations)

    links: dict[tuple[int, int], Link] = {}
    if group is None:
        found = {kind: find(kind) for kind in kinds}
    else:
        mine = {}
        for kind, rank in kinds.items():
            if rank == group.rank:
                find(kind)
                mine[kind] = path_of(kind).read_text()
        num_pairs = group.world_size * (group.world_size - 1) // 2
        on_progress("links")
        links = measure_links(group, limit_s=min(_LINK_S, _LINKS_S / num_pairs))
        gathered = tree.gather(group.control(), json.dumps(mine).encode(), merge_mappings)
        if gathered is None:
            return None
        found = {}
        for kind, text in json.loads(gathered).items():
            path = path_of(kind)
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, text)
            found[kind] = DeviceProfile.load(path)
    ranks = range(cluster.num_ranks)
    return Profile(
        devices=tuple(found[cluster.device(rank).name] for rank in ranks),
        links={pair: cluster.link(*pair) for pair in combinations(ranks, 2)} | links,
        memory={rank: cluster.device(rank).memory_bytes for rank in ranks},
    )


def merge_mappings(parts: list[bytes]) -> bytes:
    """Joins what ranks send as JSON objects, for `tree.gather`; keys are one rank's alone."""
    found: dict[str, Any] = {}
    for part in parts:
        found |= json.loads(part)
    return json.dumps(found).encode()
