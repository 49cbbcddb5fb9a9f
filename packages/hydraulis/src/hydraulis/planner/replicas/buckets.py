"""Parameters cut into buckets, each of which ranks exchange at once.

A bucket has a few rows of every rank's shard in the optimizer's layout, so that all ranks send alike
from the first bucket on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal

from hydraulis.planner.replicas.layout import ParameterPlacement
from shared.comms.reshard import Transfer
from shared.topology.boxes import Box, intersect

__all__ = ["ParameterPiece", "cut_buckets"]


@dataclass(frozen=True, kw_only=True)
class ParameterPiece:
    """Some rows of each rank's shard of a parameter.

    Attributes:
        parameter: whose rows they are.
        at: number of the piece.
        count: pieces of the parameter.
    """

    parameter: ParameterPlacement
    at: int
    count: int

    def rows(self, shard: Box) -> Box:
        """Of a rank's shard the rows of this piece; none where the shard has fewer rows than pieces."""
        num_rows = -(-shard.sizes[0] // self.count)
        start = min(self.at * num_rows, shard.sizes[0])
        return Box(
            (shard.offsets[0] + start, *shard.offsets[1:]),
            (min(num_rows, shard.sizes[0] - start), *shard.sizes[1:]),
        )

    def of(
        self, transfers: Sequence[Transfer], shards: Sequence[Box], owner: Literal["src", "dst"]
    ) -> list[Transfer]:
        """What transfers move of this piece.

        Args:
            transfers: of the parameter, each of rows of one rank's shard.
            shards: of all ranks.
            owner: which end of a transfer owns its rows.
        """
        found = []
        for one in transfers:
            part = intersect(one.box, self.rows(shards[getattr(one, owner)]))
            if part is not None:
                found.append(one._replace(box=part))
        return found


def cut_buckets(
    parameters: Sequence[ParameterPlacement], num_ranks: int, most_bytes: int
) -> list[list[ParameterPiece]]:
    """Cuts parameters into buckets, in order; a row is never cut.

    Args:
        parameters: to be exchanged, all at once where they are small.
        num_ranks: over which the optimizer's layout shards them.
        most_bytes: of a bucket on each rank.
    """
    buckets: list[list[ParameterPiece]] = []
    held_bytes = 0
    for one in parameters:
        num_rows = -(-one.shape[0] // num_ranks)
        row_bytes = one.itemsize * prod(one.shape[1:])
        count = max(1, -(-num_rows // max(1, most_bytes // row_bytes)))
        piece_bytes = -(-num_rows // count) * row_bytes
        for at in range(count):
            if not buckets or held_bytes + piece_bytes > most_bytes:
                buckets.append([])
                held_bytes = 0
            buckets[-1].append(ParameterPiece(parameter=one, at=at, count=count))
            held_bytes += piece_bytes
    return buckets
