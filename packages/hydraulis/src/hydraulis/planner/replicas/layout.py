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

    def given(self, parameter: ParameterPlacement) -> list[Box]:
        """By rank, of which part of the gradient it has an addend to give.

        Of gradients that are alike on tensor-parallel ranks each gives a slice.
        """
        if parameter.sharing != "whole":
            return self.held(parameter)
        return layout_boxes(parameter.shape, 0, self._teams(parameter), self.num_ranks)

    def load_transfers(self, parameter: ParameterPlacement, rank: int) -> list[Transfer]:
        """To the compute layout, what a rank sends and receives; between two ranks at most one box."""
        held, owned = self.held(parameter), self.owned(parameter)
        found = [Transfer(src, rank, part) for src, part in _slices(held[rank], owned)]
        for dst, box in enumerate(held):
            part = intersect(box, owned[rank])
            if part is not None and dst != rank:
                found.append(Transfer(rank, dst, part))
        return found

    def sum_transfers(self, parameter: ParameterPlacement, rank: int) -> list[list[Transfer]]:
        """Addends of the gradient that a rank sends and receives, by the rank that gives them."""
        given, owned = self.given(parameter), self.owned(parameter)
        found = []
        for src, box in enumerate(given):
            if src == rank:
                addends = [Transfer(src, dst, part) for dst, part in _slices(box, owned)]
            else:
                part = intersect(box, owned[rank])
                addends = [] if part is None else [Transfer(src, rank, part)]
            if addends:
                found.append(addends)
        return found

    def moved_bytes(self) -> MovedBytes:
        """Bytes of a step in this layout, of whatever layout the step before was."""
        parameters, gradients = ([0] * self.num_ranks for _ in range(2))
        for one in self.parameters:
            owned = self.owned(one)
            for box, ranks in _by_box(self.held(one)).items():
                for src, part in _slices(box, owned):
                    times = len(ranks) - (src in ranks)
                    parameters[src] += part.numel * one.itemsize * times
            for src, box in enumerate(self.given(one) if one.is_trained else ()):
                own = intersect(box, owned[src])
                stays = 0 if own is None else own.numel
                gradients[src] += (box.numel - stays) * one.itemsize
        return MovedBytes(parameters=tuple(parameters), gradients=tuple(gradients))

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


def _slices(box: Box, owned: Sequence[Box]) -> list[tuple[int, Box]]:
    """Ranks that own rows of a box, with their part of it."""
    if not box.numel:
        return []
    rows = owned[0].sizes[0]
    first, end = box.offsets[0] // rows, -(-(box.offsets[0] + box.sizes[0]) // rows)
    parts = ((rank, intersect(box, owned[rank])) for rank in range(first, end))
    return [(rank, part) for rank, part in parts if part is not None]


def _by_box(boxes: Sequence[Box]) -> dict[Box, set[int]]:
    """Different boxes, with the ranks of each."""
    found: dict[Box, set[int]] = {}
    for rank, box in enumerate(boxes):
        found.setdefault(box, set()).add(rank)
    return found
