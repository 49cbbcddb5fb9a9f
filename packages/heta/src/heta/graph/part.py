"""One part of a planned graph, as a host reads it from its own folder."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxtyping import Int64
from torch import Tensor

from heta.graph.checks import select_seeds
from heta.graph.part_files import read_part
from heta.graph.sampler import Batch, check_fanouts, read_seeds, sample_batch
from heta.graph.schema import Relation, Schema, name_relation
from shared.comms import Group
from shared.errors import ConfigError, DataError
from shared.kernels.segment import CSR

__all__ = ["Part", "load"]


@dataclass(frozen=True, eq=False, kw_only=True)
class Part:
    """What one host holds: edges of its relations, features of whole types, labels and masks.

    Attributes:
        index, num_parts: which part of the relations, of how many; 0 of 1 for "replicate" and
            "edge-cut", where all ranks compute alike.
        host, num_hosts: which folder this is, and for how many hosts the plan was made.
        schema: the whole graph's.
        strategy: "raf", "edge-cut" or "replicate".
        layers, hidden, uses_dst, head_dim: the model that the plan was made for.
        fanouts, batch_size: how the plan samples.
        roots: relations into the target that this part computes.
        shares: (index, count) of each root that is cut: this part computes it for the seeds with id
            modulo count equal to index.
        relations: the closure of the roots, a set for each layer, the last layer first.
        feat: float32 [num_nodes, dim] of each type whose features the part holds; with "edge-cut",
            those of the nodes that this host owns, in order of id.
        row_owner: the part that owns each learnable type.
        node_owner: int16 [num_nodes], the host that owns each node's rows, by type; "edge-cut" only.
        label: int64 [num_nodes of target], -1 where missing; None without labels.
        masks: bool [num_nodes of target] of each split.
        codes: each node's relation code as a sparse row [num_nodes, num_relations], by type.
        num_classes: the largest label plus 1.
        fingerprint: of the plan and the graph, the same in every part.
    """

    index: int
    num_parts: int
    host: int
    num_hosts: int
    schema: Schema
    strategy: str
    layers: int
    hidden: int
    head_dim: int | None
    uses_dst: bool
    fanouts: tuple[int, ...]
    batch_size: int
    roots: tuple[Relation, ...]
    shares: Mapping[Relation, tuple[int, int]]
    relations: tuple[frozenset[Relation], ...]
    feat: dict[str, Tensor]
    row_owner: dict[str, int]
    node_owner: dict[str, Tensor]
    label: Tensor | None
    masks: dict[str, Tensor]
    codes: dict[str, CSR]
    num_classes: int
    fingerprint: str
    structure: dict[Relation, CSR] = field(repr=False)

    def csr(self, relation: Relation) -> CSR:
        """Returns a relation's sources by destination.

        Raises:
            DataError: this part does not hold the relation.
        """
        if relation not in self.structure:
            raise DataError(
                f"part {self.index}: expected one of its relations "
                f"{', '.join(map(name_relation, self.structure))}, got {name_relation(relation)}"
            )
        return self.structure[relation]

    def input_dim(self, node_type: str) -> int:
        """Returns the width of a type's input rows: its features', or that of learnable rows."""
        return self.schema.feat_dim.get(node_type) or self.hidden

    def seeds(self, split: str) -> Int64[Tensor, " seeds"]:
        """Selects the nodes of a split that have a label, in order of id.

        Raises:
            DataError: there are no labels, or no such split.
        """
        return select_seeds(split, self.label, self.masks)

    def sample(
        self,
        seeds: Any,
        fanouts: Sequence[int] | None = None,
        *,
        epoch: int = 0,
        step: int = 0,
        seed: int = 0,
        tables: dict[str, Tensor] | None = None,
    ) -> Batch:
        """Samples the layers of a batch over the relations of this part.

        Args:
            seeds: ids of the target type, a tensor, array or list; one that is named twice counts twice.
            fanouts: most in-edges of a node and relation, the hop next to the seeds first, -1 for
                all; None takes the plan's.
            epoch, step, seed: name the random draws; parts that are given the same draw alike.
            tables: scratch memory, kept from batch to batch by one thread.

        Raises:
            ConfigError: a fan-out is invalid.
            DataError: a seed is no node of the target type.
        """
        return sample_batch(
            self,
            read_seeds(seeds, self.schema),
            check_fanouts(self.fanouts if fanouts is None else fanouts, self.layers),
            uses_dst=self.uses_dst,
            seed=seed,
            epoch=epoch,
            step=step,
            tables=tables,
        )


def load(folder: str | os.PathLike[str], part: int | None = None) -> Part:
    """Reads a part from the folder that `Plan.write` made.

    Ranks are numbered part by part: of p parts and q ranks each, rank r reads part r // q.

    Args:
        folder: the folder, or an fsspec URL; only this part's own folder below it is read.
        part: the part; None: that of this process's rank.

    Raises:
        ConfigError: there is no such part, or the ranks are no multiple of the parts.
        DataError: the folder holds no complete part.
    """
    if part is None:
        rank, ranks = (
            (0, 1) if not Group.exists() else (Group.world().rank, Group.world().world_size)
        )
        fields = read_part(folder, lambda num_parts: _part_of(rank, ranks, num_parts))
        return Part(**fields)
    return Part(**read_part(folder, lambda num_parts: _check_part(part, num_parts)))


def _part_of(rank: int, ranks: int, num_parts: int) -> int:
    if ranks % num_parts:
        raise ConfigError(
            f"expected a multiple of the plan's {num_parts} parts as ranks, got {ranks}; start "
            f"`torchrun` with as many, or plan for another number of parts"
        )
    return rank // (ranks // num_parts)


def _check_part(part: int, num_parts: int) -> int:
    if not 0 <= part < num_parts:
        raise ConfigError(f"part: expected 0 to {num_parts - 1}, got {part}")
    return part
