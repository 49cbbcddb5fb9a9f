"""Features of a sample: the row of each distinct id, and the row that each occurrence has.

A node sampled for many roots is one row, so that models project rows and then gather them, instead
of gathering rows and projecting each copy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float32, Int64
from torch import Tensor

from gnnflow.features.cache import FeatureCache
from gnnflow.features.store import Features, Kind
from gnnflow.sampling.distinct_roots import find_rows
from gnnflow.sampling.mfg import MFG, Sequences, TemporalBlock

__all__ = ["Inputs", "Rows", "attach"]


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Features of ids, each id once.

    Attributes:
        values: float32 [num_unique, dim], in ascending order of ids.
        index: int64 [occurrences], the row of `values` of each occurrence.
    """

    values: Float32[Tensor, "num_unique dim"]
    index: Int64[Tensor, " occurrences"]

    def spread(self) -> Float32[Tensor, "occurrences dim"]:
        """The row of each occurrence."""
        return self.values[self.index]


@dataclass(frozen=True, slots=True, eq=False)
class Inputs:
    """Features that a model gets with a sample; None if there are none of a kind.

    Attributes:
        nodes: of the roots and then the neighbours of the deepest hop, as `MFG.nodes` has them; with
            snapshots a list of them, the oldest snapshot first. Of sequences, of all positions.
        edges: of each hop's neighbours, the hop next to the roots first; with snapshots a list of
            lists, as `MFG.layers`. Of sequences one entry, of all positions, where the root and
            positions without a neighbour have a row of zeros.
    """

    nodes: Rows | list[Rows] | None
    edges: list[Rows | list[Rows]] | None


def attach(sample: MFG | Sequences, source: Features | FeatureCache) -> Inputs:
    """Fetches the features of a sample, each distinct id once per hop and snapshot.

    Args:
        sample: result of a `TemporalSampler`.
        source: a `FeatureCache`, which returns rows and indices on its device; or a store, with
            rows and indices on the sample's device.

    Raises:
        DataError: an id has no row.
    """

    def rows(kind: Kind, ids: Tensor) -> Rows:
        return _rows(kind, ids, source)

    has_nodes, has_edges = source.dim("node") > 0, source.dim("edge") > 0
    if isinstance(sample, Sequences):
        return Inputs(
            nodes=rows("node", sample.nodes.flatten()) if has_nodes else None,
            edges=[rows("edge", sample.eids.flatten())] if has_edges else None,
        )
    nodes = edges = None
    if has_nodes:
        is_nested = isinstance(sample.layers[-1], list)
        each = [rows("node", sample.nodes(at)) for at in range(sample.num_snapshots)]
        nodes = each if is_nested else each[0]
    if has_edges:
        edges = [
            _of_layer(layer, lambda block: rows("edge", block.eids)) for layer in sample.layers
        ]
    return Inputs(nodes=nodes, edges=edges)


def _of_layer(
    layer: TemporalBlock | list[TemporalBlock], rows: Callable[[TemporalBlock], Rows]
) -> Rows | list[Rows]:
    return [rows(block) for block in layer] if isinstance(layer, list) else rows(layer)


def _rows(kind: Kind, ids: Tensor, source: Features | FeatureCache) -> Rows:
    unique, index = _distinct(ids)
    # At most one id is -1, that of no edge, and it is the first.
    num_none = int(kind == "edge" and len(unique) > 0 and int(unique[0]) == -1)
    if isinstance(source, FeatureCache):
        values = source.fetch(kind, unique[num_none:])
    else:
        values = source.gather(kind, unique[num_none:]).to(ids.device)
    if num_none:
        values = torch.cat([values.new_zeros((1, values.shape[1])), values])
    return Rows(values=values, index=index.to(values.device))


def _distinct(ids: Tensor) -> tuple[Tensor, Tensor]:
    """As `torch.unique`; but ids that lie close together, as those of new edges do, are not sorted."""
    if len(ids):
        low, high = (int(bound) for bound in ids.aminmax())
        if high - low < 8 * len(ids):
            unique, index = find_rows(ids - low, high - low + 1)
            return unique + low, index
    return torch.unique(ids, return_inverse=True)
