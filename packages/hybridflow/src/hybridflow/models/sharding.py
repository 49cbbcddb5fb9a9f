"""Sharding of parameters over replicas by FSDP2.

FSDP2 is imported on first use, because its import takes as long as torch's own.
"""

from __future__ import annotations

import sys

from hybridflow.models.decoder import Decoder
from shared.comms.group import Group

__all__ = ["is_sharded", "shard_over"]


def shard_over(model: Decoder, group: Group) -> None:
    """Shards a decoder's parameters over a group's replicas, layer by layer."""
    from torch.distributed.fsdp import fully_shard

    mesh = group.device_mesh()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def is_sharded(model: Decoder) -> bool:
    """Whether `shard_over` has sharded this model."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(model, fsdp.FSDPModule)
