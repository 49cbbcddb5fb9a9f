"""Neighbourhoods of nodes as they were: several hops, snapshots, or one sequence a root."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal, overload

import numpy as np
import torch
from torch import Tensor

from gnnflow.graph.temporal_graph import TemporalGraph
from gnnflow.sampling.mfg import MFG, Layer, Sequences
from gnnflow.sampling.policies import SAMPLING_POLICIES
from shared.errors import ConfigError, DataError
from shared.kernels.philox import stream_key
from shared.kernels.temporal import MAX_FANOUT, Adjacency, TemporalBlock

__all__ = ["NeighborTimes", "TemporalSampler"]

NeighborTimes = Literal["edge", "root"]


class TemporalSampler:
    """Samples neighbours from exactly the edges that are strictly earlier than each root's time."""

    def __init__(
        self,
        graph: TemporalGraph,
        fanouts: Sequence[int],
        *,
        policy: str = "recent",
        replace: bool = True,
        window: float | None = None,
        snapshots: int = 1,
        neighbor_times: NeighborTimes = "edge",
        seed: int = 0,
    ) -> None:
        """Says what is sampled.

        Args:
            graph: may grow while it is sampled.
            fanouts: neighbours a root at most, a hop each; the hop next to the given roots first.
            policy: a name of `gnnflow.sampling.policies`: "recent" takes the newest neighbours,
                newest first; "uniform" draws them at random.
            replace: whether a random policy may draw an edge several times.
            window: time, in the graph's unit: only edges at most so much older than the root are
                sampled; with snapshots the length of each.
            snapshots: how many windows, one before the other, are sampled separately.
            neighbor_times: when a neighbour is asked for its own neighbours: at the time of its
                "edge", or of its "root", as loaders do that know the newest neighbours only.
            seed: of random policies. A draw depends on it, the epoch, hop, snapshot, node, time and
                number of the draw, and on nothing else; equal roots draw alike within an epoch.

        Raises:
            ConfigError: a setting is out of range, or no policy has that name.
        """
        self._policy = SAMPLING_POLICIES.get(policy)
        for fanout in fanouts:
            if not 0 <= fanout <= MAX_FANOUT:
                raise ConfigError(f"expected fanouts in [0, {MAX_FANOUT}], got {list(fanouts)}")
        if not len(fanouts):
            raise ConfigError("expected a fanout for each hop, got none")
        if snapshots < 1:
            raise ConfigError(f"expected at least one snapshot, got {snapshots}")
        if (window is None and snapshots > 1) or (window is not None and not window > 0):
            raise ConfigError(
                f"expected a window above 0 for {snapshots} snapshots, got {window}"
                if snapshots > 1
                else f"expected a window above 0, got {window}; None looks at all of the past"
            )
        if neighbor_times not in ("edge", "root"):
            raise ConfigError(f"neighbor_times: expected 'edge' or 'root', got {neighbor_times!r}")
        self.graph = graph
        self.fanouts = [int(fanout) for fanout in fanouts]
        self.policy = policy
        self.replace = replace
        self.window = window
        self.snapshots = snapshots
        self.neighbor_times: NeighborTimes = neighbor_times
        self.seed = seed
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Draws anew from now on."""
        self._epoch = epoch

    @overload
    def sample(self, nodes: Any, times: Any) -> MFG: ...
    @overload
    def sample(self, nodes: Any, times: Any, *, layout: Literal["mfg"]) -> MFG: ...
    @overload
    def sample(self, nodes: Any, times: Any, *, layout: Literal["padded"]) -> Sequences: ...

    def sample(
        self, nodes: Any, times: Any, *, layout: Literal["mfg", "padded"] = "mfg"
    ) -> MFG | Sequences:
        """Samples the neighbourhoods of roots.

        Args:
            nodes: ids, a tensor or array of one dimension; those the graph has never seen have no
                neighbours.
            times: when each is asked for; a number stands for all.
            layout: "mfg", hop by hop; "padded", the neighbours of one hop as a sequence a root.

        Raises:
            ConfigError: "padded" with several hops or snapshots, or of a policy other than the
                newest first.
            DataError: lengths or types do not fit.
        """
        if layout not in ("mfg", "padded"):
            raise ConfigError(f"expected layout 'mfg' or 'padded', got {layout!r}")
        if layout == "padded" and (
            len(self.fanouts) > 1 or self.snapshots > 1 or not self._policy.is_newest_first
        ):
            raise ConfigError(
                f"layout='padded' is one hop of the newest neighbours: expected one fanout, one "
                f"snapshot and policy='recent', got {self.fanouts}, {self.snapshots} and "
                f"{self.policy!r}"
            )
        roots, root_times, shifts = self._roots(nodes, times)
        with self.graph.reading as adjacency:
            version = self.graph.version
            layers = self._layers(adjacency, roots, root_times)
        if shifts is not None:
            layers = self._shift(layers, shifts)
        expired = self.graph.expired_before
        is_cut = expired is not None and bool((root_times <= expired).any())
        if layout == "padded":
            block = layers[0]
            assert isinstance(block, TemporalBlock), "one snapshot, so no list of them"
            return Sequences.of(block, self.fanouts[0], version, is_cut)
        return MFG(layers, version, is_cut)

    def _layers(self, adjacency: Adjacency, roots: Tensor, root_times: Tensor) -> list[Layer]:
        now = [(roots, root_times)] * self.snapshots
        layers: list[Layer] = []
        for hop, fanout in enumerate(self.fanouts):
            blocks = [
                self._hop(adjacency, *now[at], hop, at, fanout) for at in range(self.snapshots)
            ]
            layers.append(blocks if self.snapshots > 1 else blocks[0])
            if hop + 1 < len(self.fanouts):
                now = [self._next_roots(block) for block in blocks]
        return layers

    def _shift(self, layers: list[Layer], shifts: Tensor) -> list[Layer]:
        """Gives roots the times that they were asked for at, which lie before the bounds of their edges."""
        now = [shifts] * self.snapshots
        shifted: list[Layer] = []
        for layer in layers:
            blocks = layer if isinstance(layer, list) else [layer]
            of_edges = [shift[block.row] for block, shift in zip(blocks, now, strict=True)]
            found = [
                dataclasses.replace(
                    block, root_times=block.root_times - shift, dt=block.dt - of_edge
                )
                for block, shift, of_edge in zip(blocks, now, of_edges, strict=True)
            ]
            shifted.append(found if self.snapshots > 1 else found[0])
            # Neighbours are asked for at whole times of edges, unless at their roots' times.
            own = int(self.neighbor_times == "root")
            pairs = zip(now, of_edges, strict=True)
            now = [torch.cat([shift, own * of_edge]) for shift, of_edge in pairs]
        return shifted

    def _next_roots(self, block: TemporalBlock) -> tuple[Tensor, Tensor]:
        """Roots of the next hop, and when they are asked for."""
        times = block.times
        if self.neighbor_times == "root":
            times = block.root_times.index_select(0, block.row)
        return torch.cat([block.roots, block.nodes]), torch.cat([block.root_times, times])

    def _hop(
        self,
        adjacency: Adjacency,
        roots: Tensor,
        root_times: Tensor,
        hop: int,
        snapshot: int,
        fanout: int,
    ) -> TemporalBlock:
        before, since = root_times, None
        if self.window is not None:
            before = root_times - self._span(self.snapshots - 1 - snapshot)
            since = root_times - self._span(self.snapshots - snapshot)
        policy = self._policy
        key = stream_key(self.seed, self._epoch, hop, snapshot) if policy.is_random else 0
        return policy.sample_hop(
            adjacency,
            roots,
            root_times,
            fanout,
            replace=self.replace,
            before=before,
            since=since,
            key=key,
        )

    def _span(self, num_windows: int) -> int | float:
        assert self.window is not None, "asked for only where there is one"
        span = num_windows * self.window
        if self.graph.time_dtype == torch.float64:
            return float(span)
        # Whole times: the edges within 2.5 seconds are those within 2.
        return int(np.floor(span))

    def _roots(self, nodes: Any, times: Any) -> tuple[Tensor, Tensor, Tensor | None]:
        """Roots, bounds of their edges' times, and how far bounds lie behind the times asked for."""
        device, dtype = self.graph.device, self.graph.time_dtype
        if (
            isinstance(nodes, Tensor)
            and isinstance(times, Tensor)
            and nodes.dtype == times.dtype == dtype == torch.int64
            and nodes.device == times.device == device
            and nodes.ndim == 1
            and nodes.shape == times.shape
        ):
            return nodes, times, None  # the usual case, in a fraction of the time
        roots = torch.as_tensor(nodes)
        if roots.ndim != 1 or (roots.is_floating_point() and len(roots)):
            raise DataError(
                f"expected node ids of one dimension, got {roots.dtype} {list(roots.shape)}"
            )
        roots = roots.to(device, torch.int64)
        found = torch.as_tensor(times)
        if found.ndim == 0:
            found = found.expand(len(roots))
        if found.shape != roots.shape:
            raise DataError(
                f"expected a time for each of {len(roots)} roots, got {list(found.shape)}"
            )
        if found.is_floating_point() and not bool(torch.isfinite(found).all()):
            raise DataError(
                "expected finite times, got NaN or inf; to sample all edges give a time after "
                "graph.newest"
            )
        if dtype == torch.int64 and found.is_floating_point():
            # An edge of time 2 is earlier than 2.5, one of time 3 is not.
            asked, found = found.double(), found.double().ceil()
            shifts = (found - asked).to(device) if bool((found != asked).any()) else None
            return roots, found.to(device, dtype), shifts
        return roots, found.to(device, dtype), None
