"""Moves parameters from the optimizer's layout to a strategy's, and sums gradients back, layer by layer.

While a layer computes for the first time, the next ones' parameters are on their way.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property

import torch
from torch import Tensor

from hydraulis.planner.replicas import MovedBytes, ParameterPlacement, ReplicaLayout
from shared.comms import Group, reshard
from shared.comms.courier import connect
from shared.comms.reshard import Move, Transfer
from shared.topology.boxes import Box

__all__ = ["GRADIENTS", "PARAMETERS", "LayoutExchange", "LoadedParameters", "connect_lane"]

PARAMETERS, GRADIENTS = "parameters", "gradients"
"""Phases of the ledger."""
_LANE = "parameters"


def connect_lane(group: Group) -> None:
    """Opens connections for parameters on their way beside all other messages; every rank calls it."""
    connect(group, [_LANE])


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
        sender = ThreadPoolExecutor(1, thread_name_prefix="hydraulis-parameters")
        for layer, bucket in self._buckets.items():
            moves = []
            for one, owns, holds, transfers in bucket:
                value = owned[one.name]
                values[one.name] = value.new_empty(holds.sizes)
                wanted = [(holds, values[one.name])]
                moves.append(Move(transfers=transfers, held=[(owns, value)], wanted=wanted))
            pending[layer] = sender.submit(reshard.run, self._group, moves, PARAMETERS, lane=_LANE)
        sender.shutdown(wait=self._group.backend == "nccl")
        return LoadedParameters(values, pending)

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
        for bucket in self._sums:
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
            reshard.run(self._group, moves, GRADIENTS)
            for one, owns, landing in landings:
                like = owned[one.name]
                total = torch.zeros(
                    owns.sizes,
                    dtype=torch.promote_types(like.dtype, torch.float32),
                    device=like.device,
                )
                for box, part in landing:
                    total[box.within(owns)] += part
                found[one.name] = total.to(like.dtype)
        return found

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
