"""A rank's side of sending weights from one group's ranks to another's.

The plan is that of `hybridflow.reshard.planner`: a rank receives each element it needs once, from
the holder with the least to send. Weights are sent in buckets of whole layers, and both sides
compute a checksum of each. Before each bucket all ranks of both sides agree that none has raised:
otherwise the others would wait for a failed rank's messages until they time out. So all ranks stop
at the same bucket, and the exchange can run again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hybridflow.models.config import DecoderConfig
from hybridflow.models.decoder import Decoder
from hybridflow.models.pieces import Piece
from hybridflow.reshard.planner import Plan, find_held_boxes, plan_boxes
from hybridflow.reshard.transition import buckets
from hybridflow.reshard.vote import check_boxes, find_values, together
from hybridflow.workers.batch.layout import Layout
from shared.comms import reshard
from shared.comms.group import Group
from shared.errors import ConfigError
from shared.topology.boxes import Box

__all__ = ["Exchange", "Holding", "WeightRoute", "checksum"]

_CHUNK = 1 << 22
"""Elements whose checksum is computed at once, with 24 bytes of memory each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """Describes the weights that a group's ranks hold.

    Attributes:
        name: of the group.
        ranks: in the world.
        layout: of training, or of the rollout.
        is_sharded: whether replicas shard the parameters (FSDP2).
        dtype: of the weights.
        config: of the model.
    """

    name: str
    ranks: tuple[int, ...]
    layout: Layout
    is_sharded: bool
    dtype: torch.dtype
    config: DecoderConfig = field(compare=False, repr=False)

    def boxes(self, world_rank: int) -> dict[str, list[Box]]:
        """Boxes that a rank of the world holds; none if it is not in the group."""
        if world_rank not in self.ranks:
            return {}
        rank = self.ranks.index(world_rank)
        return find_held_boxes(self.config, self.layout, rank, is_sharded=self.is_sharded)


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightRoute:
    """A transfer of weights from one group's ranks to another's.

    Attributes:
        src, dst: weights of the sending and of the receiving group.
        bucket_bytes: about the most bytes of a bucket, on the rank that receives most.
    """

    src: Holding
    dst: Holding
    bucket_bytes: int

    @property
    def ranks(self) -> list[int]:
        """Ranks of both groups in the world; a plan's rank is an index into this list."""
        return sorted((*self.src.ranks, *self.dst.ranks))

    def plan(self) -> Plan:
        """Plans which rank sends which boxes to which rank."""
        sources = [self.src.boxes(rank) for rank in self.ranks]
        wanted = [self.dst.boxes(rank) for rank in self.ranks]
        return plan_boxes(sources, wanted, self.src.dtype.itemsize)


class Exchange:
    """One rank's side of a route; it can run many times."""

    def __init__(self, route: WeightRoute) -> None:
        """Plans the transfers of a route."""
        self._ranks = route.ranks
        self._plan = route.plan()
        self._buckets = [sorted(names) for names in buckets(self._plan, route.bucket_bytes)]

    def run(
        self, held: Sequence[Piece], prepare: Callable[[], Decoder], *, is_source: bool
    ) -> tuple[Decoder, dict[tuple[int, int, int], int]]:
        """Sends or receives all weights; the ranks of both sides call this together.

        Args:
            held: the pieces of this rank's shard.
            prepare: returns the model that holds, or is to receive, the pieces' values. Its
                exceptions are raised here, once the other ranks know.
            is_source: whether this rank sends.

        Returns:
            The model; and by bucket, sender and receiver (indices into the route's ranks) the
            checksum of what this rank sent or received.

        Raises:
            ConfigError: if the engine has no process groups.
            DataError: if this rank does not hold, or has no room for, a box of the plan; no weight
                has been sent then.
            CommError: if another rank raised, died, or did not take part.
        """
        if not Group.exists():
            raise ConfigError(
                "weights are synced by messages between ranks, which the inline engine does not "
                "support; use Workers.local, or let the actor generate"
            )
        group = Group.of(self._ranks, members_only=True)
        with together(group):
            model = prepare()
            views: dict[str, list[tuple[Box, Tensor]]] = {}
            for piece in held:
                views.setdefault(piece.name, []).append((piece.box, piece.view(model)))
            moves_of = [
                [
                    reshard.Move(
                        transfers=self._plan.transfers[name],
                        held=views.get(name, ()) if is_source else (),
                        wanted=() if is_source else views.get(name, ()),
                    )
                    for name in names
                ]
                for names in self._buckets
            ]
            for moves in moves_of:
                check_boxes(moves, group.rank)
        sums: dict[tuple[int, int, int], int] = {}
        for number, moves in enumerate(moves_of):
            reshard.run(group, moves, phase="weights")
            with together(group):
                for move in moves:
                    for src, dst, box in move.transfers:
                        if group.rank in (src, dst):
                            found = checksum(find_values(move.held or move.wanted, box))
                            key = (number, src, dst)
                            # Sender and receiver add up the transfers in the same order.
                            sums[key] = (3 * sums.get(key, 0) + found) % 2**64
        return model, sums


def checksum(values: Tensor) -> int:
    """A 64-bit checksum that any change of a single element changes.

    It is the sum of the elements' bits, element k times 2 k + 1, modulo 2^64.
    """
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    bits = values.reshape(-1).contiguous().view(kinds[values.element_size()])
    total = 0
    for start in range(0, len(bits), _CHUNK):
        part = bits[start : start + _CHUNK].long()
        odd = torch.arange(2 * start + 1, 2 * (start + len(part)), 2, device=part.device)
        total += int((part * odd).sum())
    return total % 2**64
