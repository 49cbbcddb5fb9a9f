"""Moves parameters from the optimizer's layout to a strategy's, and sums gradients back, layer by layer.

While a layer computes for the first time, the next ones' parameters are on their way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property

import torch
from torch import Tensor

from hydraulis.planner.replicas import MovedBytes, ParameterPlacement, ReplicaLayout
from shared.comms import Group, reshard
from shared.comms.courier import connect
from shared.comms.reshard import Move, Transfer
from shared.topology.boxes import Box

__all__ = ["GRADIENTS", "PARAMETERS", "LayoutExchange", "LoadedParameters", "connect_lanes"]

PARAMETERS, GRADIENTS = "parameters", "gradients"
"""Phases of the ledger."""
_Landing = tuple[ParameterPlacement, Box, list[tuple[Box, Tensor]]]
_LANES = ("layouts", "layouts beside")
"""While what came on one is copied, the other one's messages keep the link busy."""


def connect_lanes(group: Group) -> None:
    """Opens connections for what is on its way beside all other messages; every rank calls it."""
    connect(group, _LANES)


class LoadedParameters:
    """What a rank computes with in a step, on its way layer by layer.

    Attributes:
        values: by name, tensors of the sizes of this rank's boxes, written to until `wait`.
    """

    def __init__(self, values: Mapping[str, Tensor], pending: Mapping[int, Future[None]]) -> None:
        """Takes tensors, and by layer what fills them."""
        self.values, self._pending = values, dict(pending)

    def wait(self, layer: int) -> None:
        """Blocks until all up to this layer are there; -1 stands for what is before the layers.

        Raises:
            CommError: a rank died or the timeout passed.
        """
        for number in [one for one in self._pending if one <= layer]:
            self._pending.pop(number).result()


class LayoutExchange:
    """The exchanges of one strategy, planned when they are first needed.

    What a layer holds is one bucket: all of it that passes between two ranks is one message.

    Attributes:
        layout: of the strategy.
    """

    def __init__(self, layout: ReplicaLayout, group: Group) -> None:
        """Takes the strategy's layout, and all ranks."""
        self.layout, self._group = layout, group

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
        pending: dict[int, Future[None]] = {}
        lanes = self._open_lanes()
        for number, (layer, bucket) in enumerate(self._buckets.items()):
            moves = []
            for one, owns, holds, transfers in bucket:
                value = owned[one.name]
                values[one.name] = value.new_empty(holds.sizes)
                wanted = [(holds, values[one.name])]
                moves.append(Move(transfers=transfers, held=[(owns, value)], wanted=wanted))
            pending[layer] = self._send(lanes, number, moves, PARAMETERS)
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
            for one, owns, parts in landings:
                found[one.name] = _added(owns, parts, owned[one.name])

        try:
            for number, bucket in enumerate(self._sums):
                moves, landings = self._addends(bucket, gradients, owned)
                waiting.append((self._send(lanes, number, moves, GRADIENTS), landings))
                if len(waiting) == len(lanes):
                    add_oldest()
            while waiting:
                add_oldest()
        finally:
            for lane in lanes:
                lane.shutdown(wait=False)
        return found

    def _addends(
        self,
        bucket: Sequence[tuple[ParameterPlacement, Box, Box, list[list[Transfer]]]],
        gradients: Mapping[str, Tensor],
        owned: Mapping[str, Tensor],
    ) -> tuple[list[Move], list[_Landing]]:
        """What is sent of a bucket's gradients, and where the others' addends are to land."""
        moves, landings = [], []
        for one, owns, holds, addends in bucket:
            like = owned[one.name]
            landing = []
            for transfers in addends:
                parts = [
                    (box, like.new_empty(box.sizes))
                    for _, dst, box in transfers
                    if dst == self._group.rank
                ]
                mine = one.name in gradients and transfers[0].src == self._group.rank
                held = [(holds, gradients[one.name])] if mine else []
                moves.append(Move(transfers=transfers, held=held, wanted=parts))
                landing += parts
            landings.append((one, owns, landing))
        return moves, landings

    @cached_property
    def _buckets(self) -> dict[int, list[tuple[ParameterPlacement, Box, Box, list[Transfer]]]]:
        layout, rank = self.layout, self._group.rank
        return {
            layer: [
                (
                    one,
                    layout.owned(one)[rank],
                    layout.held(one)[rank],
                    layout.load_transfers(one, rank),
                )
                for one in bucket
            ]
            for layer, bucket in self._by_layer().items()
        }

    @cached_property
    def _sums(self) -> list[list[tuple[ParameterPlacement, Box, Box, list[list[Transfer]]]]]:
        layout, rank = self.layout, self._group.rank
        return [
            [
                (
                    one,
                    layout.owned(one)[rank],
                    layout.held(one)[rank],
                    layout.sum_transfers(one, rank),
                )
                for one in bucket
                if one.is_trained
            ]
            for bucket in self._by_layer().values()
        ]

    def _by_layer(self) -> dict[int, list[ParameterPlacement]]:
        found: dict[int, list[ParameterPlacement]] = {}
        for one in self.layout.parameters:
            found.setdefault(one.layers[0], []).append(one)
        return dict(sorted(found.items()))


def _added(owns: Box, parts: Sequence[tuple[Box, Tensor]], like: Tensor) -> Tensor:
    """The sum of addends, in their order."""
    dtype = torch.promote_types(like.dtype, torch.float32)
    total = torch.zeros(owns.sizes, dtype=dtype, device=like.device)
    for box, part in parts:
        total[box.within(owns)] += part
    return total.to(like.dtype)
