"""Features of nodes and edges that are partitioned over ranks, gathered by global id.

After GNNFlow: a node's row is stored with its edges, an edge's row with its source. Every rank
derives the same numbering of each owner's rows, so that requests name rows of the owner's store.
"""

from __future__ import annotations

import hashlib

import torch
from jaxtyping import Float32, Int64, Shaped
from torch import Tensor

from gnnflow.features.store import FeatureStore, Kind, check_ids
from gnnflow.ranks.exchange import SendPlan, check_owners, count_traffic, swap, tell_all
from shared.comms import Group, Traffic
from shared.errors import ConfigError, DataError

__all__ = ["DistributedFeatures"]

_PHASE = "features"


class DistributedFeatures:
    """A `FeatureStore` whose rows are partitioned over ranks.

    `gather` is a collective: all ranks of the group make the same sequence of calls by kind, each
    with its own ids, or none. Repeated ids are sent repeatedly; give each once, as `attach` does.
    If another thread communicates too, give this object a group of its own.

    Args:
        store: this rank's rows, in ascending order of their ids: `x[node_owners == group.rank]`,
            which may have shape [0, dim].
        group: ranks that hold the rows, one part per rank; see `paired`.
        node_owners: int64 [num_nodes], the rank in the group that has each node's row, the same on
            all ranks; None where nodes have no features.
        edge_owners: int64 [num_edges], the same for each edge id, usually its source's owner; None
            where edges have no features.

    Raises:
        ConfigError: this process is not in the group.
        DataError: an owner is no rank of the group, or `store` has another number of rows than this
            rank owns.
    """

    def __init__(
        self,
        store: FeatureStore,
        group: Group,
        *,
        node_owners: Int64[Tensor, " num_nodes"] | None = None,
        edge_owners: Int64[Tensor, " num_edges"] | None = None,
    ) -> None:
        self.store, self.group = store, group
        self._places: dict[Kind, _Places] = {}
        kinds: tuple[tuple[Kind, Tensor | None], ...] = (
            ("node", node_owners),
            ("edge", edge_owners),
        )
        for kind, owners in kinds:
            places = _Places(group.world_size)
            if owners is not None:
                check_owners(f"{kind}_owners", owners, group)
                places.extend(owners)
            if store.num_rows(kind) != places.counts[group.rank]:
                raise DataError(
                    f"expected a store with {int(places.counts[group.rank])} rows of {kind} features, "
                    f"those of rank {group.rank} in the group, got {store.num_rows(kind)}"
                )
            self._places[kind] = places

    @property
    def node_dim(self) -> int:
        """Columns of the node features; 0 where there are none."""
        return self.dim("node")

    @property
    def edge_dim(self) -> int:
        """Columns of the edge features; 0 where there are none."""
        return self.dim("edge")

    @property
    def num_nodes(self) -> int:
        """Rows of node features, of all ranks."""
        return self.num_rows("node")

    @property
    def num_edges(self) -> int:
        """Rows of edge features, of all ranks."""
        return self.num_rows("edge")

    @property
    def traffic(self) -> Traffic:
        """Bytes this rank has sent and received for features, of all objects of the process."""
        return count_traffic(self.group, _PHASE)

    def dim(self, kind: Kind) -> int:
        """Columns of a kind; 0 where it has no features."""
        return self.store.dim(kind)

    def num_rows(self, kind: Kind) -> int:
        """Rows of a kind, of all ranks."""
        self.store.num_rows(kind)  # raises for an unknown kind
        return self._places[kind].num_rows

    def gather(
        self,
        kind: Kind,
        ids: Int64[Tensor, " n"],
        out: Float32[Tensor, "n dim"] | None = None,
    ) -> Float32[Tensor, "n dim"]:
        """Rows of ids, in their order, repeats included; all ranks of the group call it together.

        Args:
            kind: "node" or "edge".
            ids: int64 [n], each in [0, num_rows).
            out: float32 [n, dim] to write to, on any device.

        Returns:
            `out`, or new rows on the group's device.

        Raises:
            ConfigError: no such kind.
            DataError: an id has no row, the kind has no features, or `out` does not fit, which the
                other ranks raise too, naming this one; or ranks differ in kind, columns or owners.
            CommError: a rank died, hangs, or the timeout passed; names it.
        """
        group = self.group
        try:
            check_ids(self, kind, ids)
            if out is not None and (out.dtype, *out.shape) != (
                torch.float32,
                len(ids),
                self.dim(kind),
            ):
                raise DataError(
                    f"expected out float32 {[len(ids), self.dim(kind)]}, got {out.dtype} "
                    f"{list(out.shape)}"
                )
        except (ConfigError, DataError):
            # The other ranks are waiting for this message.
            tell_all(group, [[-1, 0, 0, 0, 0]] * group.world_size, _PHASE)
            raise
        places = self._places[kind]
        owners, rows = places.of(ids.cpu())
        send_plan = SendPlan.to(owners, group.world_size)
        word = [int(kind == "edge"), self.dim(kind), places.num_rows, places.digest]
        words = tell_all(group, [[*word, count] for count in send_plan.sends], _PHASE)
        for rank, (*other, _) in enumerate(words):
            if other != word:
                did = "refused its ids" if other[0] < 0 else "asks for other features"
                raise DataError(
                    f"rank {group.ranks[rank]} {did}, so nothing was fetched; gather the same "
                    f"kinds in the same order on all ranks, with equal columns, rows and owners"
                )
        recvs = [word[-1] for word in words]
        asked = swap(group, rows[send_plan.order], send_plan.sends, recvs, _PHASE)
        # A store takes any number of ids, also none.
        answers = swap(group, self.store.gather(kind, asked), recvs, send_plan.sends, _PHASE)
        if out is None:
            out = answers.new_empty(len(ids), self.dim(kind))
        return out.index_copy_(0, send_plan.order.to(out.device), answers.to(out.device))

    def append(
        self,
        kind: Kind,
        rows: Shaped[Tensor, "n dim"],
        owners: Int64[Tensor, " n"],
    ) -> None:
        """Adds rows for the next ids, of which this rank stores its own; communicates nothing.

        Args:
            kind: "node" or "edge".
            rows: numbers [n, dim], the same on all ranks.
            owners: int64 [n], the rank in the group that stores each row.

        Raises:
            ConfigError: no such kind.
            DataError: lengths or columns differ, or an owner is no rank. Nothing was added.
        """
        check_owners("owners", owners, self.group)
        if len(owners) != len(rows):
            raise DataError(f"expected an owner for each of {len(rows)} rows, got {len(owners)}")
        self.store.append(kind, rows[(owners == self.group.rank).to(rows.device)])
        self._places[kind].extend(owners.cpu())


class _Places:
    # Owner of each id, and its row there: how many ids of that owner come before it.

    def __init__(self, num_ranks: int) -> None:
        self.counts = torch.zeros(num_ranks, dtype=torch.int64)
        self.num_rows = 0
        self._told = hashlib.blake2b(digest_size=8)
        self._table = torch.empty((0, 2), dtype=torch.int64)  # with room at its end

    def extend(self, owners: Tensor) -> None:
        first, last = self.num_rows, self.num_rows + len(owners)
        if last > len(self._table):
            table = torch.empty((max(last, 2 * len(self._table)), 2), dtype=torch.int64)
            table[:first] = self._table[:first]
            self._table = table
        more = torch.bincount(owners, minlength=len(self.counts))
        order = torch.argsort(owners, stable=True)
        starts = self.counts - (more.cumsum(0) - more)
        within = torch.arange(len(owners)) + torch.repeat_interleave(starts, more)
        self._table[first:last, 0] = owners
        self._table[first + order, 1] = within
        self.counts += more
        self.num_rows = last
        self._told.update(owners.contiguous().numpy().data)

    @property
    def digest(self) -> int:
        """Hash of all owners, independent of the batches they were added in."""
        return int.from_bytes(self._told.digest(), "little", signed=True)

    def of(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        owners, rows = self._table[ids].unbind(1)
        return owners.contiguous(), rows.contiguous()
