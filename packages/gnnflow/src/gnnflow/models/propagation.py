"""Propagation of features through the hops of a sample.

A layer computes each distinct root once (`gnnflow.sampling.distinct_roots`), and the layer above reads their
rows by index, as the deepest reads features.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from gnnflow.features.inputs import Inputs, Rows
from gnnflow.models.hops import Hop
from gnnflow.sampling.distinct_roots import find_distinct_roots
from gnnflow.sampling.mfg import MFG, Sequences, TemporalBlock
from shared.errors import ConfigError, DataError

__all__ = ["MFGModel", "check_rows", "check_sizes"]


def check_sizes(*, node_dim: int, edge_dim: int, **counts: int) -> None:
    """Checks that widths of features are not negative, and other counts at least 1.

    Raises:
        ConfigError: one is out of range.
    """
    for name, value in counts.items():
        if value < 1:
            raise ConfigError(f"expected {name} of at least 1, got {value}")
    for name, value in (("node_dim", node_dim), ("edge_dim", edge_dim)):
        if value < 0:
            raise ConfigError(f"expected {name} of at least 0 (no features), got {value}")


def check_rows(
    rows: Rows | list[Rows] | None, kind: Literal["node", "edge"], dim: int, num_occurrences: int
) -> Rows:
    """Returns `rows`, after checking that they fit the model.

    Raises:
        DataError: they are missing, of another width or number, or an index is out of range.
    """
    width = rows.values.shape[1] if isinstance(rows, Rows) else 0
    if not isinstance(rows, Rows) or width != dim:
        raise DataError(
            f"the model was made for {kind}_dim={dim}, got {kind} features of {width} columns"
        )
    if len(rows.index) != num_occurrences:
        raise DataError(
            f"expected {kind} features of {num_occurrences} occurrences, got {len(rows.index)}: "
            "attach features to this very sample"
        )
    # Compiled kernels on the CPU do not check bounds; gathers on a GPU do.
    if rows.index.device.type == "cpu" and num_occurrences:
        low, high = (int(bound) for bound in rows.index.aminmax())
        if low < 0 or high >= len(rows.values):
            raise DataError(
                f"expected indices of {kind} features in [0, {len(rows.values)}), got {low} to {high}"
            )
    return rows


class MFGModel(nn.Module):
    """Base of the models with one layer per hop.

    Attributes:
        layout: layout that `TemporalSampler.sample` must return.
        uses_time: whether each root is sampled at its own time; otherwise a batch's roots may share
            one.
        dim: columns of embeddings.
        node_dim, edge_dim: columns of features that are read; 0 ignores what there is.
        num_layers: hops of a sample.
        num_snapshots: of each hop.
        layers: a layer a hop, the deepest hop's first. It takes rows [num_rows, dim] and a `Hop` of
            them, and gives a row a root.
        between: what rows go through between two layers.
    """

    layout: Literal["mfg"] = "mfg"
    uses_time: bool = True

    def __init__(
        self,
        dim: int,
        node_dim: int,
        edge_dim: int,
        layers: Iterable[nn.Module],
        *,
        num_snapshots: int = 1,
        between: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.dim, self.node_dim, self.edge_dim = dim, node_dim, edge_dim
        self.num_snapshots = num_snapshots
        self.layers = nn.ModuleList(layers)
        self.num_layers = len(self.layers) // num_snapshots
        self.between = between

    def forward(self, sample: MFG | Sequences, inputs: Inputs) -> Float[Tensor, "num_roots dim"]:
        """Embeds the roots.

        Args:
            sample: an `MFG` of as many hops and snapshots as the model has.
            inputs: features attached to that sample.

        Raises:
            ConfigError: the sample is of another layout or depth.
            DataError: features are missing, of another width, or of another sample.
        """
        return self._through(sample, inputs, self.layers)

    def _through(
        self, sample: MFG | Sequences, inputs: Inputs, layers: Iterable[nn.Module], at: int = 0
    ) -> Tensor:
        """Embeds the roots by snapshot `at` alone."""
        blocks = self._check_sample(sample).snapshot(at)
        like = next(self.parameters())
        edges = self._edges(inputs, blocks, at)
        num_inputs = len(blocks[-1].roots) + len(blocks[-1].nodes)
        if self.node_dim:
            found = inputs.nodes[at] if isinstance(inputs.nodes, list) else inputs.nodes
            nodes = check_rows(found, "node", self.node_dim, num_inputs)
            rows, index = nodes.values.to(like), nodes.index.to(like.device)
        else:
            rows = like.new_zeros(1, 0)
            index = torch.zeros(num_inputs, dtype=torch.int64, device=like.device)
        for depth, layer in zip(reversed(range(self.num_layers)), layers, strict=True):
            kept, place = find_distinct_roots(blocks[depth])
            features = None if edges is None else edges[depth]
            rows = layer(rows, Hop.of(blocks[depth], kept, index, features, like))
            index = place.to(like.device)
            if depth and self.between is not None:
                rows = self.between(rows)
        return rows[index]

    def _check_sample(self, sample: MFG | Sequences) -> MFG:
        name = type(self).__name__
        if not isinstance(sample, MFG):
            raise ConfigError(
                f"{name} reads hops, got {type(sample).__name__}: sample with layout='mfg'"
            )
        if (len(sample.layers), sample.num_snapshots) != (self.num_layers, self.num_snapshots):
            raise ConfigError(
                f"{name} has {self.num_layers} layers over {self.num_snapshots} snapshots, got "
                f"{len(sample.layers)} hops of {sample.num_snapshots}: give the sampler as many "
                "fanouts and snapshots"
            )
        return sample

    def _edges(self, inputs: Inputs, blocks: list[TemporalBlock], at: int) -> list[Rows] | None:
        if not self.edge_dim:
            return None
        layers = inputs.edges or [None] * len(blocks)
        found = [layer[at] if isinstance(layer, list) else layer for layer in layers]
        return [
            check_rows(rows, "edge", self.edge_dim, len(block.nodes))
            for rows, block in zip(found, blocks, strict=True)
        ]
