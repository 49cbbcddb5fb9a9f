"""Makes the tables of a part's input rows: features and learnable rows."""

from __future__ import annotations

import torch

from heta.graph.part import Part
from heta.rows.optimizers import RowOptimizer
from heta.rows.owners import MappedOwners, ModuloOwners, Owners
from heta.rows.store import Table, initial_rows
from shared.comms import Group

__all__ = ["make_tables"]


def make_tables(
    part: Part,
    group: Group | None,
    optimizer: RowOptimizer,
    seed: int,
) -> dict[str, Table]:
    """Makes one table a type of the schema, in its order, on every rank.

    Args:
        part: this rank's part.
        group: all ranks; None for a single process.
        optimizer: of learnable rows.
        seed: of learnable rows.
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
    return tables


def _choose_owners(part: Part, name: str, ranks: int) -> Owners:
    if name in part.node_owner:
        return MappedOwners(part.node_owner[name])
    num_replicas = ranks // part.num_parts
    first = part.row_owner.get(name, 0) * num_replicas if part.strategy == "raf" else 0
    return ModuloOwners(first, num_replicas if part.strategy == "raf" else ranks)
