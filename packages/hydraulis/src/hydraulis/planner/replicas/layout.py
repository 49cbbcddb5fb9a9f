"""Where parameters and gradients lie in a step, and the boxes that move between its layouts.

Optimization and propagation are disaggregated, as in Hydraulis (arXiv 2412.07894): the optimizer's
layout is one, sharded along the first dimension over all ranks; the compute layout is another one for
every strategy. Parameters move to it before a step, and gradients are summed into the optimizer's
layout after it, on the finest slices that both layouts cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from hydraulis.planner.layouts import layout_boxes
from hydraulis.planner.proposals import ReplicaShape
from hydraulis.planner.replicas.strategy import rank_grids, stage_layers
from shared.comms import reshard
from shared.comms.reshard import Transfer
from shared.topology.boxes import Box, intersect

__all__ = ["MovedBytes", "ParameterPlacement", "ReplicaLayout"]


@dataclass(frozen=True, kw_only=True)
class ParameterPlacement:
    """How the ranks of a replica share a parameter.

    Attributes:
        name: Hugging Face's.
        shape: of the whole parameter.
        itemsize: bytes of an element.
        layers: decoder layers that use it; -1 stands for what is before them, and their number for
            what is behind.
        sharing: over tensor-parallel ranks: "cut" along `dim`; "whole" on each, whose gradients are
            alike; "parts" for whole on each, whose gradients are parts of a sum; "first" for the
            first rank alone.
        dim: dimension that is cut.
        is_trained: whether it has a gradient.
    """

    name: str
    shape: tuple[int, ...]
    itemsize: int
    layers: tuple[int, ...]
    sharing: Literal["cut", "whole", "parts", "first"]
    dim: int = 0
    is_trained: bool = True


@dataclass(frozen=True, kw_only=True)
class MovedBytes:
    """Bytes that each rank sends in a step, by rank.

    Attributes:
        parameters: to the compute layout.
        gradients: to the optimizer's layout.
    """

    parameters: tuple[int, ...]
    gradients: tuple[int, ...]


class ReplicaLayout:
    """The compute layout of one strategy, beside the optimizer's."""

    def __init__(
        self,
        parameters: Sequence[ParameterPlacement],
        shapes: Sequence[ReplicaShape],
        num_layers: int,
        num_ranks: int,
    ) -> None:
        """Plans nothing yet.

        Args:
            parameters: all of the model's.
            shapes: replicas of the strategy; they may leave ranks over.
            num_layers: decoder layers of the model.
            num_ranks: ranks in all.
        """
        self.parameters = tuple(parameters)
        self.num_ranks = num_ranks
        self._num_layers = num_layers
        self._grids = rank_grids(shapes)

    def owned(self, parameter: ParameterPlacement) -> list[Box]:
        """By rank, what it holds in the optimizer's layout, DTensor's `Shard(0)`."""
        return layout_boxes(parameter.shape, 0, [range(self.num_ranks)], self.num_ranks)

    def held(self, parameter: ParameterPlacement) -> list[Box]:
        """By rank, what it computes with."""
        teams, dim = self._teams(parameter), 0
        if parameter.sharing == "cut":
            dim = parameter.dim
        elif parameter.sharing == "first":
            teams = [team[:1] for team in teams]
        else:
            teams = [[rank] for team in teams for rank in team]
        return layout_boxes(parameter.shape, dim, teams, self.num_ranks)

    def load_transfers(self, parameter: ParameterPlacement) -> list[Transfer]:
        """From the optimizer's layout to the compute layout."""
        sources = [[box] for box in self.owned(parameter)]
        wanted = [[box] for box in self.held(parameter)]
        return reshard.plan(sources, wanted, parameter.itemsize)

    def sum_transfers(self, parameter: ParameterPlacement) -> list[list[Transfer]]:
        """Addends of the gradient to the optimizer's layout, by the rank that has them, in its order.

        Of gradients that are alike on tensor-parallel ranks each gives a slice.
        """
        gives = self.held(parameter)
        if parameter.sharing == "whole":
            gives = layout_boxes(parameter.shape, 0, self._teams(parameter), self.num_ranks)
        owned = self.owned(parameter)
        rows = max(owned[0].sizes[0], 1)
        found = []
        for src, box in enumerate(gives):
            if not box.numel:
                continue
            first, end = box.offsets[0] // rows, -(-(box.offsets[0] + box.sizes[0]) // rows)
            parts = [(dst, intersect(box, owned[dst])) for dst in range(first, end)]
            found.append([Transfer(src, dst, part) for dst, part in parts if part is not None])
        return found

    def moved_bytes(self) -> MovedBytes:
        """Bytes of a step in this layout, of whatever layout the step before was."""
        sent = {"parameters": [0] * self.num_ranks, "gradients": [0] * self.num_ranks}
        for one in self.parameters:
            moves = [("parameters", self.load_transfers(one))]
            if one.is_trained:
                moves += [("gradients", part) for part in self.sum_transfers(one)]
            for kind, transfers in moves:
                counts = reshard.sent_bytes(transfers, one.itemsize, self.num_ranks)
                sent[kind] = [a + b for a, b in zip(sent[kind], counts, strict=True)]
        return MovedBytes(parameters=tuple(sent["parameters"]), gradients=tuple(sent["gradients"]))

    def _teams(self, parameter: ParameterPlacement) -> list[list[int]]:
        """Tensor-parallel ranks that hold the parameter together, replica by replica."""
        found = []
        for grid in self._grids:
            for stage, layers in enumerate(stage_layers(self._num_layers, len(grid))):
                known = set(layers)
                known |= {-1} if not stage else set()
                known |= {self._num_layers} if stage == len(grid) - 1 else set()
                if known.intersection(parameter.layers):
                    found += grid[stage].reshape(-1, grid.shape[-1]).tolist()
        return found
