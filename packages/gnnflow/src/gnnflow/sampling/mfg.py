"""What a sampler returns: hops of a message-flow graph, or sequences of neighbours."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Int64, Shaped
from torch import Tensor

from shared.errors import ConfigError
from shared.kernels.temporal import TemporalBlock

__all__ = ["MFG", "Layer", "Sequences", "TemporalBlock"]

Layer = TemporalBlock | list[TemporalBlock]


@dataclass(frozen=True, slots=True, eq=False)
class MFG:
    """The neighbourhoods of roots over several hops.

    Attributes:
        layers: one block per hop, the hop next to the roots first; with snapshots one list of
            blocks per hop, the oldest snapshot first. The roots of the next hop are the roots of this one, in
            order, and then its neighbours, in order, each at the time of its edge (of its root,
            where the sampler's `neighbor_times` is "root").
        version: version of the graph that was sampled.
        is_cut: whether a root's time is so early that some edges before it may have expired.
    """

    layers: list[Layer]
    version: int = 0
    is_cut: bool = False

    @property
    def num_snapshots(self) -> int:
        """Number of snapshots of each hop."""
        first = self.layers[0] if self.layers else []
        return len(first) if isinstance(first, list) else 1

    def snapshot(self, at: int) -> list[TemporalBlock]:
        """The hops of one snapshot, next to the roots first."""
        return [layer[at] if isinstance(layer, list) else layer for layer in self.layers]

    def blocks(self) -> Iterator[TemporalBlock]:
        """All blocks: hop by hop, snapshot by snapshot."""
        for layer in self.layers:
            yield from layer if isinstance(layer, list) else [layer]

    def nodes(self, snapshot: int = 0) -> Int64[Tensor, " inputs"]:
        """The nodes whose features the deepest hop needs: its roots, then its neighbours."""
        deepest = self.snapshot(snapshot)[-1]
        return torch.cat([deepest.roots, deepest.nodes])

    def to_dgl(self, snapshot: int = 0) -> list[Any]:
        """The hops as DGL blocks, as `dgl.dataloading` gives them: the deepest first.

        A block's source nodes are its roots and then its neighbours, an occurrence each; `srcdata`
        holds "_ID" and "time", `edata` holds "_ID", "time" and "dt".

        Raises:
            ConfigError: dgl is not installed.
        """
        try:
            import dgl
        except ImportError as error:
            raise ConfigError(
                f"to_dgl needs dgl ({error}): pip install 'meshyard-gnnflow[dgl]'"
            ) from (error)
        found = []
        for block in reversed(self.snapshot(snapshot)):
            num_roots, num_sampled = len(block.roots), len(block.nodes)
            sources = torch.arange(num_roots, num_roots + num_sampled)
            graph = dgl.create_block(
                (sources, block.row), num_src_nodes=num_roots + num_sampled, num_dst_nodes=num_roots
            )
            graph.srcdata["_ID"] = torch.cat([block.roots, block.nodes])
            graph.srcdata["time"] = torch.cat([block.root_times, block.times])
            graph.dstdata["_ID"], graph.dstdata["time"] = block.roots, block.root_times
            graph.edata["_ID"], graph.edata["time"] = block.eids, block.times
            graph.edata["dt"] = block.dt
            found.append(graph)
        return found

    def to_pyg(self, snapshot: int = 0) -> Any:
        """All hops as one PyG `Data`, as its loaders give them: the roots are the first nodes.

        `n_id` and `time` are of the nodes, an occurrence each; `edge_index` goes from neighbour to
        root; `e_id`, `edge_time` and `dt` are of the edges; `num_sampled_nodes` and
        `num_sampled_edges` count by hop, so that `trim_to_layer` works. A root of several hops has
        the neighbours of its first one, as in PyG's own loaders.

        Raises:
            ConfigError: torch_geometric is not installed.
        """
        try:
            from torch_geometric.data import Data
        except ImportError as error:
            raise ConfigError(
                f"to_pyg needs torch_geometric ({error}): pip install 'meshyard-gnnflow[pyg]'"
            ) from error
        blocks = self.snapshot(snapshot)
        device = blocks[0].roots.device
        places = torch.arange(len(blocks[0].roots), device=device)
        num_nodes, num_old, kept = len(places), 0, []
        for block in blocks:
            # PyG's layers share one set of edges, so that a node has those of its first hop only.
            is_new = (block.row >= num_old) & (places[block.row] >= 0)
            num_old, root_places = len(places), places
            own = torch.full_like(block.nodes, -1)
            own[is_new] = torch.arange(num_nodes, num_nodes + int(is_new.sum()), device=device)
            num_nodes += int(is_new.sum())
            places = torch.cat([root_places, own])
            kept.append((block, is_new, torch.stack([own, root_places[block.row]])[:, is_new]))
        return Data(
            n_id=torch.cat([blocks[0].roots, *(block.nodes[new] for block, new, _ in kept)]),
            time=torch.cat([blocks[0].root_times, *(block.times[new] for block, new, _ in kept)]),
            edge_index=torch.cat([edges for _, _, edges in kept], 1),
            e_id=torch.cat([block.eids[new] for block, new, _ in kept]),
            edge_time=torch.cat([block.times[new] for block, new, _ in kept]),
            dt=torch.cat([block.dt[new] for block, new, _ in kept]),
            num_sampled_nodes=[len(blocks[0].roots), *(int(new.sum()) for _, new, _ in kept)],
            num_sampled_edges=[int(new.sum()) for _, new, _ in kept],
            batch_size=len(blocks[0].roots),
        )


@dataclass(frozen=True, slots=True, eq=False)
class Sequences:
    """The neighbours of each root as a sequence, oldest first, the root itself last.

    Attributes:
        nodes: int64 [num_roots, fanout + 1]; 0 where there is none.
        times: [num_roots, fanout + 1], of the edges, and the root's own.
        dt: [num_roots, fanout + 1], root time minus edge time.
        eids: int64 [num_roots, fanout + 1]; -1 for the root and where there is none.
        mask: bool [num_roots, fanout + 1], False where there is none; those stand on the left.
        version, is_cut: see `MFG`.
    """

    nodes: Int64[Tensor, "num_roots length"]
    times: Shaped[Tensor, "num_roots length"]
    dt: Shaped[Tensor, "num_roots length"]
    eids: Int64[Tensor, "num_roots length"]
    mask: Bool[Tensor, "num_roots length"]
    version: int = 0
    is_cut: bool = False

    @classmethod
    def of(
        cls, block: TemporalBlock, fanout: int, version: int = 0, is_cut: bool = False
    ) -> Sequences:
        """Lays out a hop whose neighbours come newest first."""
        num_roots, device = len(block.roots), block.roots.device
        counts = torch.bincount(block.row, minlength=num_roots)
        starts = counts.cumsum(0) - counts
        rank = torch.arange(len(block.row), device=device) - starts[block.row]
        place = block.row * (fanout + 1) + fanout - 1 - rank

        def laid_out(values: Tensor, of_root: Tensor | int, missing: int) -> Tensor:
            filled = torch.full((num_roots, fanout + 1), missing, dtype=values.dtype, device=device)
            filled.view(-1)[place] = values
            filled[:, fanout] = of_root
            return filled

        mask = torch.arange(fanout + 1, device=device) >= fanout - counts[:, None]
        return cls(
            nodes=laid_out(block.nodes, block.roots, 0),
            times=laid_out(block.times.to(block.root_times.dtype), block.root_times, 0),
            dt=laid_out(block.dt, 0, 0),
            eids=laid_out(block.eids, -1, -1),
            mask=mask,
            version=version,
            is_cut=is_cut,
        )
