"""Models of heterogeneous graphs over a part: one's own convolutions, R-GCN, RGAT, HGT and BG-HGNN.

Names are imported on first use, so that the command line can list models without torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from heta.nn.bghgnn import BGHGNN
    from heta.nn.hetero_model import HeteroModel
    from heta.nn.hgt import HGT
    from heta.nn.rgat import RGAT
    from heta.nn.rgcn import RGCN

__all__ = ["BGHGNN", "HGT", "RGAT", "RGCN", "HeteroModel"]

_HOMES = {"HeteroModel": "hetero_model"}


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(import_module(f"heta.nn.{_HOMES.get(name, name.lower())}"), name)
    raise AttributeError(f"module 'heta.nn' has no attribute {name!r}")
