"""Sampling a graph that lies on several ranks, with the answers of one process.

After GNNFlow: an edge lives with its source, a hop's roots are split by owner, sampled there and merged
in the order of the roots; and in static scheduling a rank asks only the ranks of its own place on
other hosts, so that all ranks of a host carry equal shares. Departures: collectives that count
their bytes in place of remote calls; equal roots are asked about once; draws that depend on the root
alone, so that every bit is as on one rank; and rebalancing that loses no edge (the published form
drops what cannot be divided).
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
    """As `TemporalSampler`, over a graph whose edges lie with the owners of their sources.

    Every rank of the group samples as often as every other, each its own roots, any number of them, in
    the same order of calls; a rank with none gives none. The answer is bit for bit that of one process
    that has all edges, but for `version`, which is that of this rank's graph. Where another thread
    communicates too, give a group of its own, such as `Group.control()`.
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
        """Says what is sampled; communicates nothing.

        Args:
            graph: the edges of this rank's nodes, as `owned` picks them.
            owners: the rank in the group of each node, the same on all ranks; -1, or an id beyond
                them, has no neighbours. May be set anew as nodes come.
            fanouts, policy, replace, window, snapshots, neighbor_times, seed: see `TemporalSampler`;
                the same on all ranks.
            group: who has the edges, one part a rank; see `paired`.

        Raises:
            ConfigError: a setting makes no sense, or this process is not in the group.
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
        self.num_served = 0  # different roots sampled for any rank, this one included
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
        # One entry more, for ids beyond them.
        self._owners = torch.cat([owners, torch.tensor([-1])])

    @property
    def traffic(self) -> Traffic:
        """Bytes this rank has sent and received for sampling, on all samplers of the process."""
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
            DataError: see there, on the rank itself; on the others, that it has refused its roots.
            CommError: a rank died, hangs, or the timeout passed; names it.
        """
        self._has_met = False
        try:
            found = super().sample(nodes, times, layout=layout)
        except Exception:
            if not self._has_met:  # the others wait for a word
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
        """Learns that all ranks are to sample alike, and since when they all have their edges."""
        self._has_met = True
        group, expired = self.group, self.graph.expired_before
        bound = torch.tensor([expired or 0], dtype=self.graph.time_dtype)
        flags = int(has_refused), int(expired is not None)
        # As 64 bits with a sign; epochs that are keys of their own take all of them.
        own = (self._epoch + 2**63) % 2**64 - 2**63, self._digest
        word = [*flags, *own, int(_bits(bound))]
        words = tell_all(group, [word] * group.world_size, _PHASE)
        if has_refused:
            return
        for rank, (other_refused, _, epoch, digest, _) in enumerate(words):
            peer = group.ranks[rank]
            if other_refused:
                raise DataError(
                    f"rank {peer} refused its roots, so that none were sampled; see its own error"
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
        # Neighbours of busy nodes are one another's: each node and time is asked about once.
        bits, at = torch.unique(_bits(root_times.cpu()), return_inverse=True)
        different, which = torch.unique(known * len(bits) + at, return_inverse=True)
        questions = torch.stack([different // len(bits), bits[different % len(bits)]], 1)
        send_plan = SendPlan.to(self._owners[questions[:, 0]], group.world_size)
        recvs = [count for (count,) in tell_all(group, [[n] for n in send_plan.sends], _PHASE)]

        asked = swap(group, questions[send_plan.order], send_plan.sends, recvs, _PHASE).to(device)
        times = asked[:, 1].contiguous().view(root_times.dtype)
        found = super()._hop(adjacency, asked[:, 0].contiguous(), times, hop, snapshot, fanout)
        self.num_served += len(asked)

        # At most MAX_FANOUT a root, which fits.
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
    """The events that the graph of one part takes, with their ids, in their order.

    For an undirected graph those with either end in the part: both go to `add_edges` of a graph that
    is undirected too, whose entries at nodes of other parts are there in vain, one for each edge cut.
    A graph knows the times of its own edges only: events out of order go in with late="merge", or are
    dropped or refused before they are split.

    Raises:
        DataError: a node has no entry in `owners`, or one whose edges count has -1 there.
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
            f"node {node} has edges and no owner, so that no rank would keep them; give it a part first"
        )
    is_own = owners[events.src] == part
    if undirected:
        is_own |= owners[events.dst] == part
    return events[is_own]


def paired(group: Group, ranks_per_host: int) -> Group:
    """The ranks of one place on every host, in the order of the hosts: whom a rank asks.

    For hosts of several ranks that all hold the host's part: part p is asked at host p's rank of the
    asker's own place, so that each rank of a host serves an equal share. Every rank of the world calls
    this.

    Args:
        group: the world; consecutive ranks are on one host.
        ranks_per_host: the same on all hosts.

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

    Only surplus moves: the last ones of ranks that have too many, to the ranks that have too few. A pure
    function, so that every rank computes the same.

    Args:
        edges: of each rank, the positions of its edges in the list of events.

    Returns:
        The same for each rank after the move, ascending.
    """
    counts = [len(own) for own in edges]
    share, more = divmod(sum(counts), max(len(counts), 1))
    # The ranks with the most edges keep one more where they do not divide.
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
