"""Parameters shared out among replicas by FSDP2, which is imported when it is used.

It takes as long to import as torch itself, and every rank would wait for it.
"""

from __future__ import annotations

import sys

from hybridflow.models.decoder import Decoder
from shared.comms.group import Group

__all__ = ["is_sharded", "shard_over"]


def shard_over(model: Decoder, group: Group) -> None:
    """Has a group's replicas share a decoder's parameters out, layer by layer."""
    from torch.distributed.fsdp import fully_shard

    mesh = group.device_mesh()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def is_sharded(model: Decoder) -> bool:
    """Whether `shard_over` was called with it."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(model, fsdp.FSDPModule)
