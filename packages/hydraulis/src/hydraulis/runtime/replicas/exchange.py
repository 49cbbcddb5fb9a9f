"""Moves parameters from the optimizer's layout to a strategy's, and sums gradients back, layer by layer.

While a layer computes for the first time, the next ones' parameters are on their way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from hydraulis.planner.replicas import (
    MovedBytes,
    ParameterPiece,
    ParameterPlacement,
    ReplicaLayout,
    cut_buckets,
)
from shared.comms import Group, reshard
from shared.comms.courier import connect
from shared.comms.reshard import Move, Transfer
from shared.topology.boxes import Box

__all__ = ["GRADIENTS", "PARAMETERS", "LayoutExchange", "LoadedParameters", "connect_lanes"]

PARAMETERS, GRADIENTS = "parameters", "gradients"
"""Phases of the ledger."""
_BUCKET_BYTES = 8 << 20
_LANES = ("layouts", "layouts beside")
"""While what came on one is copied, the other one's messages keep the link busy."""


class _Load(NamedTuple):
    """What is moved of a parameter in a bucket, between what this rank owns of it and computes with."""

    parameter: ParameterPlacement
    owns: Box
    holds: Box
    transfers: list[Transfer]


class _Sum(NamedTuple):
    """What is moved of a gradient in a bucket, by the rank that gives it, and this rank's rows of the sum."""

    parameter: ParameterPlacement
    owns: Box
    rows: Box
    holds: Box
    addends: list[list[Transfer]]


_Landing = tuple[_Sum, list[tuple[Box, Tensor]]]


def connect_lanes(group: Group) -> None:
    """Opens connections for what is on its way beside all other messages; every rank calls it."""
    connect(group, _LANES)


class LoadedParameters:
    """What a rank computes with in a step, on its way layer by layer.

    Attributes:
        values: by name, tensors of the sizes of this rank's boxes, written to until `wait`.
    """

    def __init__(
        self, values: Mapping[str, Tensor], pending: Mapping[int, Sequence[Future[None]]]
    ) -> None:
        """Takes tensors, and by layer what fills them."""
        self.values, self._pending = values, dict(pending)

    def wait(self, layer: int) -> None:
        """Blocks until all up to this layer are there; -1 stands for what is before the layers.

        Raises:
            CommError: a rank died or the timeout passed.
        """
        for number in [one for one in self._pending if one <= layer]:
            for arriving in self._pending.pop(number):
                arriving.result()


class LayoutExchange:
    """The exchanges of one strategy, planned when they are first needed.

    Layers are cut into buckets, of each of which all that passes between two ranks is one message.

    Attributes:
        layout: of the strategy.
    """

    def __init__(
        self, layout: ReplicaLayout, group: Group, *, bucket_bytes: int = _BUCKET_BYTES
    ) -> None:
        """Takes the strategy's layout, and all ranks.

        Args:
            layout: of the strategy.
            group: all ranks.
            bucket_bytes: most bytes of a bucket on each rank. What is packed before the first message, and
                copied after the last one, nothing hides; small messages take longer for their bytes.
        """
        self.layout, self._group, self._bucket_bytes = layout, group, bucket_bytes

    @cached_property
    def moved(self) -> MovedBytes:
        """Bytes that each rank sends in a step."""
        return self.layout.moved_bytes()

    def load(self, owned: Mapping[str, Tensor]) -> LoadedParameters:
        """Sends for what this rank computes with, and returns at once; every rank calls it.

        On GPUs it returns when all is there: messages of two threads would mix on NCCL's stream.

        Args:
            owned: by name, this rank's shards in the optimizer's layout, only read until all has been
                waited for.

        Raises:
            CommError: a rank died or the timeout passed.
        """
        values: dict[str, Tensor] = {}
        pending: dict[int, list[Future[None]]] = {}
        lanes = self._open_lanes()
        for number, (layer, bucket) in enumerate(self._loads):
            moves = []
            for one in bucket:
                name = one.parameter.name
                if name not in values:
                    values[name] = owned[name].new_empty(one.holds.sizes)
                held, wanted = [(one.owns, owned[name])], [(one.holds, values[name])]
                moves.append(Move(transfers=one.transfers, held=held, wanted=wanted))
            pending.setdefault(layer, []).append(self._send(lanes, number, moves, PARAMETERS))
        for lane in lanes:
            lane.shutdown(wait=self._group.backend == "nccl")
        return LoadedParameters(values, pending)

    def _open_lanes(self) -> list[ThreadPoolExecutor]:
        """A thread for each lane; one on GPUs, as messages of two threads would mix on NCCL's stream."""
        count = 1 if self._group.backend == "nccl" else len(_LANES)
        return [ThreadPoolExecutor(1, thread_name_prefix="hydraulis-layouts") for _ in range(count)]

    def _send(
        self, lanes: Sequence[ThreadPoolExecutor], number: int, moves: list[Move], phase: str
    ) -> Future[None]:
        """Sends a bucket on the lane that is its number's turn, the same on all ranks."""
        at = number % len(lanes)
        return lanes[at].submit(reshard.run, self._group, moves, phase, lane=_LANES[at])

    def sum_gradients(
        self, gradients: Mapping[str, Tensor], owned: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Sums of gradients over ranks, in the optimizer's layout; every rank calls it.

        Addends are added in the order of their ranks, in float32 or wider, whenever they arrive.

        Args:
            gradients: by name, of what this rank computed with; none on a rank without a replica.
            owned: by name, this rank's shards in the optimizer's layout, for their types.

        Raises:
            CommError: a rank died or the timeout passed.
        """
        found: dict[str, Tensor] = {}
        lanes = self._open_lanes()
        waiting: deque[tuple[Future[None], list[_Landing]]] = deque()

        def add_oldest() -> None:
            pending, landings = waiting.popleft()
            pending.result()
            for one, parts in landings:
                name = one.parameter.name
                if name not in found:
                    found[name] = owned[name].new_empty(one.owns.sizes)
                _sum_parts(found[name][one.rows.within(one.owns)], one.rows, parts)

        try:
            for number, bucket in enumerate(self._sums):
                moves, landings = self._addends(bucket, gradients, owned)
                waiting.append((self._send(lanes, number, moves, GRADIENTS), landings))
                if len(waiting) > len(lanes):
                    add_oldest()
            while waiting:
                add_oldest()
        finally:
            for lane in lanes:
                lane.shutdown(wait=False)
        return found

    def _addends(
        self,
        bucket: Sequence[_Sum],
        gradients: Mapping[str, Tensor],
        owned: Mapping[str, Tensor],
    ) -> tuple[list[Move], list[_Landing]]:
        """What is sent of a bucket's gradients, and where the others' addends are to land."""
        moves, landings = [], []
        for one in bucket:
            name, landing = one.parameter.name, []
            for transfers in one.addends:
                if transfers[0].src == self._group.rank:
                    whole = gradients[name]
                    sent = [transfer for transfer in transfers if transfer.dst != self._group.rank]
                    moves.append(Move(transfers=sent, held=[(one.holds, whole)], wanted=[]))
                    stays = [box for _, dst, box in transfers if dst == self._group.rank]
                    landing += [(box, whole[box.within(one.holds)]) for box in stays]
                else:
                    parts = [(box, owned[name].new_empty(box.sizes)) for _, _, box in transfers]
                    moves.append(Move(transfers=transfers, held=[], wanted=parts))
                    landing += parts
            landings.append((one, landing))
        return moves, landings

    @cached_property
    def _loads(self) -> list[tuple[int, list[_Load]]]:
        """Of each bucket its layer and what is moved of it."""
        layout, rank = self.layout, self._group.rank
        found = []
        for layer, bucket in self._cut(layout.parameters):
            loads = []
            for piece in bucket:
                one = piece.parameter
                shards = layout.owned(one)
                transfers = piece.of(layout.load_transfers(one, rank), shards, "src")
                loads.append(_Load(one, shards[rank], layout.held(one)[rank], transfers))
            found.append((layer, loads))
        return found

    @cached_property
    def _sums(self) -> list[list[_Sum]]:
        """Of each bucket what is summed of it."""
        layout, rank = self.layout, self._group.rank
        found = []
        for _, bucket in self._cut([one for one in layout.parameters if one.is_trained]):
            sums = []
            for piece in bucket:
                one = piece.parameter
                shards, holds = layout.owned(one), layout.held(one)[rank]
                addends = [
                    part
                    for transfers in layout.sum_transfers(one, rank)
                    if (part := piece.of(transfers, shards, "dst"))
                ]
                sums.append(_Sum(one, shards[rank], piece.rows(shards[rank]), holds, addends))
            found.append(sums)
        return found

    def _cut(
        self, parameters: Sequence[ParameterPlacement]
    ) -> list[tuple[int, list[ParameterPiece]]]:
        """Buckets with their layers, in the order in which layers compute."""
        by_layer: dict[int, list[ParameterPlacement]] = {}
        for one in parameters:
            by_layer.setdefault(one.layers[0], []).append(one)
        return [
            (layer, bucket)
            for layer, held in sorted(by_layer.items())
            for bucket in cut_buckets(held, self.layout.num_ranks, self._bucket_bytes)
        ]


def _sum_parts(target: Tensor, rows: Box, parts: Sequence[tuple[Box, Tensor]]) -> None:
    """Writes the sum of addends, in their order."""
    dtype = torch.promote_types(target.dtype, torch.float32)
    total = target if target.dtype == dtype else torch.empty_like(target, dtype=dtype)
    is_whole = bool(parts) and parts[0][0] == rows
    if is_whole:
        total.copy_(parts[0][1])
    else:
        total.zero_()
    for box, part in parts[is_whole:]:
        total[box.within(rows)] += part
    if total is not target:
        target.copy_(total)
