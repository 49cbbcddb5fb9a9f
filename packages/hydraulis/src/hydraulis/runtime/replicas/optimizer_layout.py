"""The one layout of parameters, gradients and optimizer states: sharded by rows over all ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hydraulis.planner.layouts import layout_boxes
from shared.comms import Group, broadcast
from shared.topology.boxes import Box

__all__ = ["OptimizerLayout"]


class OptimizerLayout:
    """A model's parameters as DTensors `Shard(0)` over all ranks, in the model itself."""

    def __init__(self, model: nn.Module, group: Group) -> None:
        """Replaces the model's parameters by shards of rank 0's; every rank calls it.

        Args:
            model: the same on every rank, but for the values of its parameters.
            group: all ranks.
        """
        self._group = group
        self._parameters: dict[str, nn.Parameter] = {}
        sharded: dict[int, nn.Parameter] = {}
        for name, one in list(model.named_parameters()):
            boxes = layout_boxes(one.shape, 0, [range(group.world_size)], group.world_size)
            whole = broadcast(group, one.detach().contiguous().clone(), 0)
            mine = whole[boxes[group.rank].within(Box((0,) * one.ndim, tuple(one.shape)))].clone()
            made = nn.Parameter(group.shard_rows(mine, one), requires_grad=one.requires_grad)
            self._parameters[name] = sharded[id(one)] = made
        for module in model.modules():
            for leaf, one in list(module.named_parameters(recurse=False)):
                setattr(module, leaf, sharded[id(one)])

    @torch.no_grad()
    def owned(self) -> dict[str, Tensor]:
        """This rank's shards, by name."""
        return {name: _local(one) for name, one in self._parameters.items()}

    def set_gradients(self, gradients: Mapping[str, Tensor]) -> None:
        """Gives parameters their gradients, of which these are this rank's shards."""
        for name, local in gradients.items():
            parameter = self._parameters[name]
            parameter.grad = self._group.shard_rows(local, parameter)


def _local(parameter: nn.Parameter) -> Tensor:
    sharded: Any = parameter.data
    return sharded.to_local()
