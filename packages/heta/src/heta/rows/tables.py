"""The tables of a part's input rows: features and learnable rows."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from heta.graph.part import Part
from heta.rows.cache import RemoteRowCache
from heta.rows.device_rows import DeviceRows
from heta.rows.optimizers import RowOptimizer
from heta.rows.owners import MappedOwners, ModuloOwners, Owners
from shared.comms import Group
from shared.kernels.gather import gather
from shared.kernels.philox import stream_key

__all__ = ["Table", "initial_rows", "make_tables"]

_CHUNK = 65_536


@dataclass(slots=True, eq=False)
class Table:
    """One type's rows on this rank.

    Attributes:
        rows: float32 [owned rows, dim], those that this rank owns, or all rows of the type if `owners`
            is None.
        owners: who owns which; None if every rank that reads the type has all its rows.
        is_learnable: whether rows are trained.
        num_nodes: nodes of the type, over all owners.
        state: the optimizer's, by name, of owned rows.
        cache: copies of other ranks' rows; None without.
        on_device: those of `rows` that lie on the model's device; None without.
    """

    rows: Tensor
    owners: Owners | None
    is_learnable: bool
    num_nodes: int
    state: dict[str, Tensor] = field(default_factory=dict)
    cache: RemoteRowCache | None = None
    on_device: DeviceRows | None = None

    def read(self, where: Tensor) -> Tensor:
        """Reads owned rows into the host's memory, by position."""
        rows = gather(self.rows, where)
        if self.on_device is not None:
            slots = self.on_device.slots(where)
            there = (slots >= 0).nonzero()[:, 0]
            rows[there] = self.on_device.rows[slots[there].to(self.on_device.rows.device)].cpu()
        return rows

    def read_to_device(self, where: Tensor, out: Tensor) -> None:
        """Reads owned rows, by position, into memory on the model's device."""
        device = out.device
        if self.on_device is None:
            gather(self.rows, where.to(device), out)
            return
        slots = self.on_device.slots(where)
        for rows, source, chosen in (
            (self.on_device.rows, slots, slots >= 0),
            (self.rows, where, slots < 0),
        ):
            position = chosen.nonzero()[:, 0]
            out[position.to(device)] = gather(rows, source[position].to(device))

    def update(self, optimizer: RowOptimizer, where: Tensor, grads: Tensor) -> None:
        """Applies gradients to owned rows, each named once, wherever the rows lie."""
        if self.on_device is None:
            optimizer.step(self.rows, self.state, where, grads.to(self.rows.device))
            return
        slots, there = self.on_device.slots(where), self.on_device
        for rows, state, index, chosen in (
            (there.rows, there.state, slots, slots >= 0),
            (self.rows, self.state, where, slots < 0),
        ):
            position = chosen.nonzero()[:, 0]
            if len(position):
                own_grads = grads[position.to(grads.device)].to(rows.device)
                optimizer.step(rows, state, index[position].to(rows.device), own_grads)


def initial_rows(ids: Tensor, dim: int, seed: int, number: int) -> Tensor:
    """Draws the initial rows of nodes of type `number`, the same for an id wherever it is drawn.

    Returns:
        Normal numbers [ids, dim] of standard deviation 1 / sqrt(dim).
    """
    rows = torch.empty(len(ids), dim)
    chunks = ids // _CHUNK
    order = chunks.argsort(stable=True)
    names, counts = chunks[order].unique_consecutive(return_counts=True)
    for chunk, chosen in zip(names.tolist(), order.split(counts.tolist()), strict=True):
        generator = torch.Generator().manual_seed(stream_key(seed, number, chunk) >> 1)
        drawn = torch.randn(_CHUNK, dim, generator=generator)
        rows[chosen] = drawn[ids[chosen] % _CHUNK]
    return rows.mul_(dim**-0.5)


def make_tables(
    part: Part,
    group: Group | None,
    optimizer: RowOptimizer,
    seed: int,
    device: torch.device,
) -> dict[str, Table]:
    """Makes one table a type of the schema, in its order, on every rank.

    Args:
        part: this rank's part.
        group: all ranks; None for a single process.
        optimizer: of learnable rows.
        seed: of learnable rows.
        device: where the model lies; a GPU reads rows in pinned memory by itself.
    """
    rank, ranks = (0, 1) if group is None else (group.rank, group.world_size)
    tables: dict[str, Table] = {}
    for number, (name, num_nodes) in enumerate(part.schema.num_nodes.items()):
        is_learnable = name in part.schema.learnable
        owners = _choose_owners(part, name, ranks) if is_learnable or part.node_owner else None
        if is_learnable:
            assert owners is not None, "learnable rows have owners"
            ids = owners.owned_by(rank, num_nodes)
            rows = initial_rows(ids, part.hidden, seed, number)
            tables[name] = Table(rows, owners, True, num_nodes, optimizer.new_state(rows))
        elif name in part.feat:
            tables[name] = Table(part.feat[name], owners, False, num_nodes)
        elif part.node_owner:
            # A host may own no node of a type and read others' rows.
            dim = part.schema.feat_dim[name]
            tables[name] = Table(torch.empty(0, dim), owners, False, num_nodes)
    if device.type == "cuda":
        for table in tables.values():
            table.rows = table.rows.pin_memory()
    return tables


def _choose_owners(part: Part, name: str, ranks: int) -> Owners:
    if name in part.node_owner:
        return MappedOwners(part.node_owner[name])
    num_replicas = ranks // part.num_parts
    first = part.row_owner.get(name, 0) * num_replicas if part.strategy == "raf" else 0
    return ModuloOwners(first, num_replicas if part.strategy == "raf" else ranks)
