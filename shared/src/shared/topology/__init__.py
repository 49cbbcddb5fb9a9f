"""Description of a cluster's devices and links, and the cost of moving bytes through it.

Names are imported lazily, so that a command line which only prints its help stays fast.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shared.topology.boxes import Box, decompose, intersect, subtract
    from shared.topology.cluster import Cluster, Host
    from shared.topology.device import Device
    from shared.topology.link import Link, LinkFit, fit_link
    from shared.topology.mesh import Mesh
    from shared.topology.replay import CriticalStep, Operation, QueueUse, Replay, Timeline

__all__ = [
    "Box",
    "Cluster",
    "CriticalStep",
    "Device",
    "Host",
    "Link",
    "LinkFit",
    "Mesh",
    "Operation",
    "QueueUse",
    "Replay",
    "Timeline",
    "decompose",
    "fit_link",
    "intersect",
    "subtract",
]

_HOME = {
    "Box": "boxes",
    "decompose": "boxes",
    "intersect": "boxes",
    "subtract": "boxes",
    "CriticalStep": "replay",
    "Operation": "replay",
    "QueueUse": "replay",
    "Timeline": "replay",
    "Host": "cluster",
    "LinkFit": "link",
    "fit_link": "link",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"shared.topology.{_HOME.get(name, name.lower())}"), name)
