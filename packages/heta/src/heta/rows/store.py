"""Reads the input rows of a batch, wherever they lie, and returns the gradients of learnable ones.

A row lies on its owner. Rows of other ranks are asked for in one exchange for all types; gradients
go back the same way, are summed by the owner in the order of ranks, and change the row at once.
Features never change: those of the next batch are read behind a step, by messages of their own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from heta.rows.optimizers import RowOptimizer
from heta.rows.tables import Table
from shared.comms import Group, all_gather, all_to_all_v
from shared.kernels.neighbors import relabel

__all__ = ["InputRows", "RowRequest"]


@dataclass(slots=True, eq=False)
class RowRequest:
    """Rows of one type that a batch reads.

    Attributes:
        ids: the nodes.
        order: positions of the ids by owner.
        counts: ids of each owner.
        rows: what was read, on the model's device; a leaf that takes gradients if the type is
            learnable.
        buffer: memory whose first rows these are, on the CPU used again after `release`.
    """

    ids: Tensor
    order: Tensor
    counts: list[int]
    rows: Tensor
    buffer: Tensor


class InputRows:
    """The rows that this rank's batches read.

    Args:
        tables: this rank's tables by type, the same types in the same order on every rank.
        optimizer: of learnable rows.
        group: all ranks; None for a single process.
        features_group: all ranks again, for the messages of `read_features` alone.
        device: where rows are read to.

    Attributes:
        rank: this rank among all.
        device: where rows are read to.
        learnable, features: names of the types of either kind.
    """

    def __init__(
        self,
        tables: dict[str, Table],
        optimizer: RowOptimizer,
        group: Group | None,
        features_group: Group | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self.tables, self.optimizer = tables, optimizer
        self.device = torch.device(device)
        self._group = group if group is not None and group.world_size > 1 else None
        self.rank = group.rank if group is not None else 0
        self._size = group.world_size if group is not None else 1
        self._scratch: dict[str, Tensor] = {}
        self.learnable = tuple(name for name, table in tables.items() if table.is_learnable)
        self.features = tuple(name for name in tables if name not in self.learnable)
        # What every rank keeps whole needs no exchange, and no rank waits for one.
        travelling = [name for name, table in tables.items() if table.owners is not None]
        self._travelling = travelling if self._group is not None else []
        self._features_group = features_group
        self._asked: dict[str, list[Tensor]] = {}
        # The first touch of fresh memory takes three times as long as copying rows there.
        self._buffers: dict[str, list[Tensor]] = {name: [] for name in tables}

    def read_features(self, wanted: Mapping[str, Tensor]) -> dict[str, RowRequest]:
        """Reads rows of features; every rank calls it equally often, if with nothing.

        One thread may call it while another calls `read_learnable` and `give_back`.

        Args:
            wanted: ids by type, each once; learnable types are left out.
        """
        return self._read(wanted, self.features, self._features_group)[0]

    def read_learnable(
        self, wanted: Mapping[str, Tensor], *, with_gradients: bool = True
    ) -> dict[str, RowRequest]:
        """Reads learnable rows; every rank calls it equally often, if with nothing.

        Args:
            wanted: ids by type, each once; types with features are left out.
            with_gradients: whether the rows are leaves that take gradients, for `give_back`.
        """
        requests, asked = self._read(wanted, self.learnable, self._group)
        if with_gradients:
            self._asked = asked
            for request in requests.values():
                request.rows.requires_grad_()
        return requests

    def _read(
        self, wanted: Mapping[str, Tensor], names: Sequence[str], group: Group | None
    ) -> tuple[dict[str, RowRequest], dict[str, list[Tensor]]]:
        """Reads rows of some types; also returns what each rank asked for here, by type."""
        requests: dict[str, RowRequest] = {}
        for name in names:
            if name in self._travelling or name not in wanted:
                continue
            table, ids = self.tables[name], wanted[name]
            where = ids if table.owners is None else table.owners.local(ids)
            requests[name] = self._open(name, ids, torch.arange(len(ids)), [len(ids)])
            table.read_to_device(where, requests[name].rows)
        travelling = [name for name in names if name in self._travelling]
        if not travelling:
            return requests, {}
        assert group is not None, "rows travel between ranks only"
        return requests, self._read_remote(wanted, travelling, group, requests)

    def _read_remote(
        self,
        wanted: Mapping[str, Tensor],
        travelling: Sequence[str],
        group: Group,
        requests: dict[str, RowRequest],
    ) -> dict[str, list[Tensor]]:
        """Reads the rows that travel; returns what each rank asked for here, by type."""
        empty = torch.empty(0, dtype=torch.int64)
        asked: dict[str, tuple[Tensor, Tensor, list[int]]] = {}
        for name in travelling:
            ids = wanted.get(name, empty)
            table = self.tables[name]
            assert table.owners is not None, "it travels"
            owner = table.owners.rank_of(ids)
            if table.cache is not None:
                owner = torch.where(table.cache.has(ids), self.rank, owner)
            order = owner.argsort(stable=True)
            asked[name] = ids, order, torch.bincount(owner, minlength=self._size).tolist()
        counts = torch.tensor([[a[2][rank] for a in asked.values()] for rank in range(self._size)])
        counts[self.rank] = 0
        theirs = torch.stack(all_gather(group, counts))[:, self.rank]
        ids_to = [
            torch.cat([_slice(a[0][a[1]], a[2], rank) for a in asked.values()])
            if rank != self.rank
            else empty
            for rank in range(self._size)
        ]
        ids_from = [
            torch.empty(int(theirs[rank].sum()), dtype=torch.int64) for rank in range(self._size)
        ]
        with group.ledger.phase("rows"):
            all_to_all_v(group, ids_to, ids_from)
        replies = []
        asked_here: dict[str, list[Tensor]] = {name: [] for name in travelling}
        for rank in range(self._size):
            sizes = theirs[rank].tolist()
            parts = []
            for name, ids in zip(travelling, ids_from[rank].split(sizes), strict=True):
                table = self.tables[name]
                where = table.owners.local(ids)  # pyrefly: ignore
                asked_here[name].append(where)
                parts.append(table.read(where).flatten())
            replies.append(torch.cat(parts))
        dims = {name: self.tables[name].rows.shape[1] for name in travelling}
        incoming = [
            torch.empty(sum(int(counts[rank, i]) * dims[n] for i, n in enumerate(travelling)))
            for rank in range(self._size)
        ]
        with group.ledger.phase("rows"):
            all_to_all_v(group, replies, incoming)
        offsets = [0] * self._size
        for i, (name, (ids, order, by_rank)) in enumerate(asked.items()):
            table, parts = self.tables[name], []
            for rank in range(self._size):
                if rank == self.rank:
                    own = ids[order][sum(by_rank[:rank]) : sum(by_rank[: rank + 1])]
                    parts.append(self._read_own(table, own))
                    continue
                size = int(counts[rank, i]) * dims[name]
                parts.append(
                    incoming[rank][offsets[rank] : offsets[rank] + size]
                    .view(-1, dims[name])
                    .to(self.device)
                )
                offsets[rank] += size
            if name in wanted:
                requests[name] = self._open(name, ids, order, by_rank)
                requests[name].rows[order.to(self.device)] = torch.cat(parts)
        return asked_here

    def _open(self, name: str, ids: Tensor, order: Tensor, counts: list[int]) -> RowRequest:
        """A request with memory for its rows."""
        dim = self.tables[name].rows.shape[1]
        if self.device.type != "cpu":
            rows = torch.empty(len(ids), dim, device=self.device)
            return RowRequest(ids, order, counts, rows, rows)
        free = self._buffers[name]
        buffer = free.pop() if free else torch.empty(0, dim)
        if len(buffer) < len(ids):
            buffer = torch.empty(len(ids) + len(ids) // 4, dim)
        return RowRequest(ids, order, counts, buffer[: len(ids)], buffer)

    def release(self, requests: Mapping[str, RowRequest]) -> None:
        """Takes back the memory of rows that nobody reads any more."""
        # On a GPU the step that reads them may not have run yet, and torch keeps memory itself.
        if self.device.type == "cpu":
            for name, request in requests.items():
                self._buffers[name].append(request.buffer)

    def _read_own(self, table: Table, ids: Tensor) -> Tensor:
        assert table.owners is not None, "it travels"
        if table.cache is not None:
            rows = table.cache.read(ids, table.rows, table.owners, self.rank)
            return rows.to(self.device)
        rows = torch.empty(len(ids), table.rows.shape[1], device=self.device)
        table.read_to_device(table.owners.local(ids), rows)
        return rows

    def give_back(self, requests: Mapping[str, RowRequest]) -> None:
        """Sends gradients to the owners, and updates and releases the rows; every rank calls it.

        A learnable row that was read and got no gradient counts as touched, by a gradient of 0.
        """
        grads = {
            name: _gradient(requests[name]) if name in requests else None for name in self.learnable
        }
        received: dict[str, list[tuple[Tensor, Tensor]]] = {name: [] for name in self.learnable}
        travelling = [name for name in self._travelling if name in grads]
        if travelling:
            self._send_gradients(travelling, requests, grads, received)
        for name in self.learnable:
            table, request, grad = self.tables[name], requests.get(name), grads[name]
            parts = received[name]
            if request is not None and grad is not None and name not in travelling:
                where = request.ids if table.owners is None else table.owners.local(request.ids)
                parts.append((where, grad))
            self._update(name, table, parts)
        self.release(requests)

    def _send_gradients(
        self,
        travelling: list[str],
        requests: Mapping[str, RowRequest],
        grads: Mapping[str, Tensor | None],
        received: dict[str, list[tuple[Tensor, Tensor]]],
    ) -> None:
        assert self._group is not None, "rows travel between ranks only"
        dims = {name: self.tables[name].rows.shape[1] for name in travelling}
        sends = []
        own: dict[str, tuple[Tensor, Tensor]] = {}
        for rank in range(self._size):
            parts = [torch.empty(0)]
            for name in travelling:
                request, grad = requests.get(name), grads[name]
                if request is None or grad is None:
                    continue
                start = sum(request.counts[:rank])
                chosen = request.order[start : start + request.counts[rank]]
                sent = grad[chosen.to(grad.device)]
                if rank == self.rank:
                    table = self.tables[name]
                    own[name] = table.owners.local(request.ids[chosen]), sent  # pyrefly: ignore
                else:
                    parts.append(sent.flatten().cpu())
            sends.append(torch.cat(parts))
        sizes = [
            sum(len(self._asked[name][rank]) * dims[name] for name in travelling)
            for rank in range(self._size)
        ]
        recvs = [torch.empty(size) for size in sizes]
        with self._group.ledger.phase("row gradients"):
            all_to_all_v(self._group, sends, recvs)
        for rank in range(self._size):
            offset = 0
            for name in travelling:
                if rank == self.rank:
                    if name in own:
                        received[name].append(own[name])
                    continue
                where = self._asked[name][rank]
                size = len(where) * dims[name]
                grad = recvs[rank][offset : offset + size].view(-1, dims[name])
                received[name].append((where, grad))
                offset += size

    def _update(self, name: str, table: Table, parts: list[tuple[Tensor, Tensor]]) -> None:
        parts = [part for part in parts if len(part[0])]
        if not parts:
            return
        if len(parts) == 1:
            # A batch names each node once.
            table.update(self.optimizer, *parts[0])
            return
        if name not in self._scratch:
            self._scratch[name] = torch.full((len(table.rows),), -1, dtype=torch.int32)
        rows, position = relabel(
            [where for where, _ in parts], len(table.rows), parts[0][0][:0], self._scratch[name]
        )
        total = torch.zeros(len(rows), table.rows.shape[1])
        total.index_add_(0, position, torch.cat([grad.cpu() for _, grad in parts]))
        table.update(self.optimizer, rows, total)


def _slice(values: Tensor, counts: list[int], index: int) -> Tensor:
    start = sum(counts[:index])
    return values[start : start + counts[index]]


def _gradient(request: RowRequest) -> Tensor | None:
    rows = request.rows
    return torch.zeros_like(rows) if rows.grad is None else rows.grad
