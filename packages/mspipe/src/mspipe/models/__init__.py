"""Temporal graph models with node memory: TGN, JODIE and APAN, with the equations of TGL."""

from mspipe.models.apan import APAN
from mspipe.models.base import LinkHead, MemoryModel, TimeEncoding, Updated, mail_dim
from mspipe.models.jodie import JODIE
from mspipe.models.tgn import TGN, NeighborAttention

__all__ = [
    "APAN",
    "JODIE",
    "TGN",
    "LinkHead",
    "MemoryModel",
    "NeighborAttention",
    "TimeEncoding",
    "Updated",
    "mail_dim",
]
