"""Sampling of a graph that is partitioned over ranks, with the results of one process.

After GNNFlow: an edge is stored with its source's owner; a hop's roots are split by owner, sampled
there and merged in the order of the roots; and in static scheduling a rank asks only the ranks of
its own place on other hosts, so that all ranks of a host serve equal shares. Departures:
collectives that count their bytes replace remote calls; equal roots are requested once; draws
depend on the root alone, so that results equal one rank's bit for bit; and rebalancing loses no
edge (the published form drops what cannot be divided).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, overload

import torch
from jaxtyping import Int64, Shaped
from torch import Tensor

from gnnflow.graph.temporal_graph import TemporalGraph
from gnnflow.ranks.exchange import SendPlan, check_owners, count_traffic, swap, tell_all
from gnnflow.sampling.mfg import MFG, Layer, Sequences
from gnnflow.sampling.sampler import NeighborTimes, TemporalSampler
from shared.comms import Group, Traffic
from shared.data.events import Events
from shared.errors import ConfigError, DataError
from shared.kernels.temporal import Adjacency, TemporalBlock

__all__ = ["DistributedSampler", "owned", "paired", "rebalance"]

_PHASE = "sample"


class DistributedSampler(TemporalSampler):
    """A `TemporalSampler` over a graph whose edges are stored by the owners of their sources.

    `sample` is a collective: all ranks of the group make the same sequence of calls, each with its
    own roots, or none. The result is bit for bit that of one process with all edges, except for
    `version`, which is that of this rank's graph. If another thread communicates too, give this
    sampler a group of its own, such as `Group.control()`.
    """

    def __init__(
        self,
        graph: TemporalGraph,
        owners: Int64[Tensor, " num_nodes"],
        fanouts: Sequence[int],
        group: Group,
        *,
        policy: str = "recent",
        replace: bool = True,
        window: float | None = None,
        snapshots: int = 1,
        neighbor_times: NeighborTimes = "edge",
        seed: int = 0,
    ) -> None:
        """Sets what is sampled; communicates nothing.

        Args:
            graph: the edges of this rank's nodes, as `owned` picks them.
            owners: int64 [num_nodes], the rank in the group that stores each node's edges, the same
                on all ranks; nodes with -1, and ids beyond, have no neighbours. Assign the
                attribute `owners` again when nodes are added.
            fanouts, policy, replace, window, snapshots, neighbor_times, seed: see
                `TemporalSampler`; the same on all ranks.
            group: ranks that store the edges, one part per rank; see `paired`.

        Raises:
            ConfigError: a setting is out of range, or this process is not in the group.
            DataError: an owner is no rank of the group.
        """
        super().__init__(
            graph,
            fanouts,
            policy=policy,
            replace=replace,
            window=window,
            snapshots=snapshots,
            neighbor_times=neighbor_times,
            seed=seed,
        )
        self.group = group
        self.num_served = 0  # distinct roots sampled for all ranks, this one included
        self.owners = owners

    @property
    def owners(self) -> Int64[Tensor, " num_nodes"]:
        """The rank in the group of each node."""
        return self._owners[:-1]

    @owners.setter
    def owners(self, owners: Int64[Tensor, " num_nodes"]) -> None:
        check_owners("owners", owners, self.group, lowest=-1)
        owners = owners.cpu()
        names = ("fanouts", "policy", "replace", "window", "snapshots", "neighbor_times", "seed")
        settings = [getattr(self, name) for name in names]
        told = f"{settings} {self.graph.time_dtype}".encode()
        digest = hashlib.blake2b(told + owners.contiguous().numpy().tobytes(), digest_size=8)
        self._digest = int.from_bytes(digest.digest(), "little", signed=True)
        # One more entry, for ids beyond the last.
        self._owners = torch.cat([owners, torch.tensor([-1])])

    @property
    def traffic(self) -> Traffic:
        """Bytes this rank has sent and received for sampling, of all samplers of the process."""
        return count_traffic(self.group, _PHASE)

    @overload
    def sample(self, nodes: Any, times: Any) -> MFG: ...
    @overload
    def sample(self, nodes: Any, times: Any, *, layout: Literal["mfg"]) -> MFG: ...
    @overload
    def sample(self, nodes: Any, times: Any, *, layout: Literal["padded"]) -> Sequences: ...

    def sample(
        self, nodes: Any, times: Any, *, layout: Literal["mfg", "padded"] = "mfg"
    ) -> MFG | Sequences:
        """Samples the neighbourhoods of this rank's roots; all ranks of the group call it together.

        Raises:
            ConfigError: see `TemporalSampler.sample`; or ranks differ in settings, owners or epoch.
            DataError: see `TemporalSampler.sample`; the other ranks raise too, naming this one.
            CommError: a rank died, hangs, or the timeout passed; names it.
        """
        self._has_met = False
        try:
            found = super().sample(nodes, times, layout=layout)
        except Exception:
            if not self._has_met:  # the other ranks are waiting for this message
                self._meet(has_refused=True)
            raise
        is_padded = isinstance(found, Sequences)
        times = found.times[:, -1] if is_padded else next(found.blocks()).root_times
        is_cut = self._expired is not None and bool((times <= self._expired).any())
        return replace(found, is_cut=is_cut)

    def _layers(self, adjacency: Adjacency, roots: Tensor, root_times: Tensor) -> list[Layer]:
        self._meet()
        return super()._layers(adjacency, roots, root_times)

    def _meet(self, has_refused: bool = False) -> None:
        """Checks that all ranks sample with equal settings, and finds the latest expiry of any."""
        self._has_met = True
        group, expired = self.group, self.graph.expired_before
        bound = torch.tensor([expired or 0], dtype=self.graph.time_dtype)
        flags = int(has_refused), int(expired is not None)
        # As int64: epochs that are stream keys take all 64 bits.
        own = (self._epoch + 2**63) % 2**64 - 2**63, self._digest
        word = [*flags, *own, int(_bits(bound))]
        words = tell_all(group, [word] * group.world_size, _PHASE)
        if has_refused:
            return
        for rank, (other_refused, _, epoch, digest, _) in enumerate(words):
            peer = group.ranks[rank]
            if other_refused:
                raise DataError(
                    f"rank {peer} refused its roots, so nothing was sampled; see that rank's error"
                )
            if (epoch, digest) != own:
                what = "settings or owners" if digest != self._digest else f"epoch {self._epoch}"
                raise ConfigError(
                    f"expected the same {what} on all ranks, rank {peer} has others; give all ranks "
                    f"the same arguments, owners and set_epoch"
                )
        bounds = torch.tensor([bits for *_, bits in words]).view(self.graph.time_dtype)
        known = [bound.item() for bound, word in zip(bounds, words, strict=True) if word[1]]
        self._expired = max(known, default=None)

    def _hop(
        self,
        adjacency: Adjacency,
        roots: Tensor,
        root_times: Tensor,
        hop: int,
        snapshot: int,
        fanout: int,
    ) -> TemporalBlock:
        group, device = self.group, roots.device
        num_known = len(self._owners) - 1
        nodes = roots.cpu()
        known = torch.where((nodes >= 0) & (nodes < num_known), nodes, num_known)
        # Busy nodes share neighbours, so that roots repeat: each node and time is requested once.
        bits, at = torch.unique(_bits(root_times.cpu()), return_inverse=True)
        different, which = torch.unique(known * len(bits) + at, return_inverse=True)
        questions = torch.stack([different // len(bits), bits[different % len(bits)]], 1)
        send_plan = SendPlan.to(self._owners[questions[:, 0]], group.world_size)
        recvs = [count for (count,) in tell_all(group, [[n] for n in send_plan.sends], _PHASE)]

        asked = swap(group, questions[send_plan.order], send_plan.sends, recvs, _PHASE).to(device)
        times = asked[:, 1].contiguous().view(root_times.dtype)
        found = super()._hop(adjacency, asked[:, 0].contiguous(), times, hop, snapshot, fanout)
        self.num_served += len(asked)

        # int32 holds MAX_FANOUT, the most per root.
        num_found = torch.bincount(found.row, minlength=len(asked)).int()
        num_came = swap(group, num_found, recvs, send_plan.sends, _PHASE)
        entries = torch.stack([found.nodes, _bits(found.times), found.eids], 1)
        came = swap(
            group, entries, _sums(num_found, recvs), _sums(num_came, send_plan.sends), _PHASE
        )

        row, place = send_plan.answers(num_came.cpu().long(), which)
        row, place = row.to(device), place.to(came.device)
        neighbors, bits, eids = came[place].to(device).unbind(1)
        times = bits.contiguous().view(root_times.dtype)
        dt = root_times[row] - times
        nodes, eids = neighbors.contiguous(), eids.contiguous()
        return TemporalBlock(roots, root_times, nodes, times, dt, eids, row)


def _bits(times: Shaped[Tensor, " n"]) -> Int64[Tensor, " n"]:
    return times.contiguous().view(torch.int64)


def _sums(counts: Tensor, lengths: list[int]) -> list[int]:
    return [int(part.sum()) for part in counts.split(lengths)]


def owned(
    events: Events,
    owners: Int64[Tensor, " num_nodes"],
    part: int,
    *,
    undirected: bool = False,
) -> Events:
    """The events that the graph of one part stores, with their ids, in stream order.

    For an undirected graph, those with either end in the part; add them to a graph that is
    undirected too, which then has one unused entry per cut edge, at the node of the other part.
    A graph checks lateness against its own edges only: insert out-of-order events with
    late="merge", or drop or refuse them before they are split.

    Args:
        events: the events of all parts, in stream order.
        owners: part of each node.
        part: the part whose events are returned.
        undirected: whether an event is also stored at its destination.

    Raises:
        DataError: a node has no entry in `owners`, or the owner of an edge's entry is -1.
    """
    if len(owners) < events.num_nodes:
        raise DataError(
            f"expected an owner for each of {events.num_nodes} nodes, got {len(owners)}; give new "
            "sources a part first"
        )
    holders = torch.cat([events.src, events.dst]) if undirected else events.src
    if bool((owners[holders] < 0).any()):
        node = int(holders[owners[holders] < 0][0])
        raise DataError(
            f"node {node} has edges and no owner, so no rank would store them; give it a part first"
        )
    is_own = owners[events.src] == part
    if undirected:
        is_own |= owners[events.dst] == part
    return events[is_own]


def paired(group: Group, ranks_per_host: int) -> Group:
    """The group of the ranks with this rank's place on every host, in the order of the hosts.

    For hosts of several ranks that all hold the host's part: requests for part p go to host p's
    rank of the asker's own place, so that each rank of a host serves an equal share. A collective
    of all ranks.

    Args:
        group: the world; consecutive ranks are on one host.
        ranks_per_host: number of ranks on each host.

    Raises:
        ConfigError: it does not divide the ranks, or the group is not the world.
    """
    num_ranks = group.world_size
    if ranks_per_host < 1 or num_ranks % ranks_per_host:
        raise ConfigError(
            f"expected ranks_per_host to divide the {num_ranks} ranks, got {ranks_per_host}"
        )
    if group.ranks != Group.world().ranks:
        raise ConfigError(f"expected the group of all ranks, got {group}")
    places = [Group.of(range(place, num_ranks, ranks_per_host)) for place in range(ranks_per_host)]
    return places[group.rank % ranks_per_host]


def rebalance(
    edges: Sequence[Int64[Tensor, " _"]],
) -> list[Int64[Tensor, " _"]]:
    """Evens out the training edges of ranks to counts that differ by one at most; none is lost.

    Only surplus moves: the last edges of ranks that have too many, to the ranks that have too few.
    A pure function, so that every rank computes the same result.

    Args:
        edges: for each rank, the positions of its edges in the list of events.

    Returns:
        The same for each rank after the move, ascending.
    """
    counts = [len(own) for own in edges]
    share, more = divmod(sum(counts), max(len(counts), 1))
    # If the total is not divisible, the ranks with the most edges keep one more.
    largest = sorted(range(len(counts)), key=lambda rank: -counts[rank])[:more]
    targets = [share + (rank in largest) for rank in range(len(counts))]
    kept = [own.sort().values[:target] for own, target in zip(edges, targets, strict=True)]
    left = [own.sort().values[target:] for own, target in zip(edges, targets, strict=True)]
    surplus = torch.cat([torch.empty(0, dtype=torch.int64), *left])
    needs = [target - len(own) for own, target in zip(kept, targets, strict=True)]
    return [
        torch.cat([own, extra]).sort().values
        for own, extra in zip(kept, surplus.split(needs) if needs else (), strict=True)
    ]
