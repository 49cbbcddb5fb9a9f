"""Models of heterogeneous graphs over a part: one's own convolutions, R-GCN, RGAT, HGT and BG-HGNN."""

from heta.nn.bghgnn import BGHGNN
from heta.nn.hetero_model import HeteroModel
from heta.nn.hgt import HGT
from heta.nn.rgat import RGAT
from heta.nn.rgcn import RGCN

__all__ = ["BGHGNN", "HGT", "RGAT", "RGCN", "HeteroModel"]
