"""Graph layers on a rank's share: GCN, GraphSAGE, GIN and GAT, and stacks of them.

Under every policy a GCN, GraphSAGE or GIN layer sends the narrower of its input and its output, and
a first layer of these aggregates the constant input once. Both tricks are known and not part of
AdaQP; they make the exact baseline a strong one.
"""

from itertools import pairwise
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from adaqp.messages.distgraph import DistGraph
from shared.errors import ConfigError

__all__ = ["Dropout", "GATConv", "GCNConv", "GINConv", "SAGEConv", "gat", "gcn", "gin", "sage"]


class GCNConv(nn.Module):
    """A x W + b with the symmetric normalisation and self loops of Kipf and Welling.

    Equals `dgl.nn.GraphConv(in_dim, out_dim, norm="both")` on the graph with one self loop a node.

    Args:
        dg: the rank's share of the graph.
        in_dim, out_dim: number of input and of output columns.
    """

    def __init__(self, dg: DistGraph, in_dim: int, out_dim: int) -> None:
        super().__init__()
        self.dg = dg
        self.weight = nn.Parameter(torch.empty(in_dim, out_dim))
        self.bias = nn.Parameter(torch.zeros(out_dim))
        nn.init.xavier_uniform_(self.weight)

    def forward(self, h: Tensor) -> Tensor:
        """[num_local, in_dim] -> [num_local, out_dim]."""
        if h is self.dg.feat or self.weight.shape[0] <= self.weight.shape[1]:
            return self.dg.aggregate_linear(h, self.weight, self.bias, "gcn")
        return self.dg.aggregate(h @ self.weight, "gcn") + self.bias


class SAGEConv(nn.Module):
    """x W_self + mean of in-neighbours W + b.

    Equals `dgl.nn.SAGEConv(in_dim, out_dim, "mean")`.

    Args:
        dg: the rank's share of the graph.
        in_dim, out_dim: number of input and of output columns.
    """

    def __init__(self, dg: DistGraph, in_dim: int, out_dim: int) -> None:
        super().__init__()
        self.dg = dg
        self.own = nn.Linear(in_dim, out_dim)
        self.neighbour = nn.Linear(in_dim, out_dim, bias=False)

    def forward(self, h: Tensor) -> Tensor:
        """[num_local, in_dim] -> [num_local, out_dim]."""
        if h is self.dg.feat or self.own.in_features <= self.own.out_features:
            mixed = self.dg.aggregate_linear(h, self.neighbour.weight.T, weight="mean")
            return self.own(h) + mixed
        return self.own(h) + self.dg.aggregate(self.neighbour(h), "mean")


class GINConv(nn.Module):
    """MLP((1 + eps) x + sum of in-neighbours).

    Equals `torch_geometric.nn.GINConv` with the same MLP and trained eps.

    Args:
        dg: the rank's share of the graph.
        in_dim, out_dim: number of input and of output columns.
    """

    def __init__(self, dg: DistGraph, in_dim: int, out_dim: int) -> None:
        super().__init__()
        self.dg = dg
        self.eps = nn.Parameter(torch.zeros(1))
        self.mlp = nn.Sequential(nn.Linear(in_dim, out_dim), nn.ReLU(), nn.Linear(out_dim, out_dim))

    def forward(self, h: Tensor) -> Tensor:
        """[num_local, in_dim] -> [num_local, out_dim]."""
        first, relu, second = self.mlp
        first = cast(nn.Linear, first)
        if h is self.dg.feat or first.in_features <= first.out_features:
            return self.mlp((1 + self.eps) * h + self.dg.aggregate(h, "sum"))
        narrow = h @ first.weight.T
        mixed = (1 + self.eps) * narrow + self.dg.aggregate(narrow, "sum") + first.bias
        return second(relu(mixed))


class GATConv(nn.Module):
    """Attention over in-neighbours and the node itself, heads concatenated.

    Equals `torch_geometric.nn.GATConv` (one self loop a node, existing ones replaced). Softmax is
    not linear in the neighbours, so only rows without remote neighbours are computed while messages
    are in transit (node split). Memory: one value per edge and head, and while summing one row of
    out_dim values per edge.

    Args:
        dg: the rank's share of the graph.
        in_dim: number of input columns.
        out_dim: number of output columns of all heads together.
        heads: number of attention heads; must divide out_dim.
        slope: negative slope of the leaky ReLU on attention logits.
    """

    def __init__(
        self, dg: DistGraph, in_dim: int, out_dim: int, heads: int = 4, slope: float = 0.2
    ) -> None:
        super().__init__()
        if out_dim % heads:
            raise ConfigError(f"GATConv: heads must divide out_dim, got {heads} and {out_dim}")
        self.dg, self.heads, self.slope = dg, heads, slope
        self.lin = nn.Linear(in_dim, out_dim, bias=False)
        self.att_src = nn.Parameter(torch.empty(heads, out_dim // heads))
        self.att_dst = nn.Parameter(torch.empty(heads, out_dim // heads))
        self.bias = nn.Parameter(torch.zeros(out_dim))
        nn.init.xavier_uniform_(self.lin.weight)
        nn.init.xavier_uniform_(self.att_src)
        nn.init.xavier_uniform_(self.att_dst)
        src, dst = dg.edge_index()
        is_edge = src != dst
        loop = torch.arange(dg.num_local, device=dst.device)
        src, dst = torch.cat([src[is_edge], loop]), torch.cat([dst[is_edge], loop])
        is_central = dst < dg.num_central
        self._central = src[is_central], dst[is_central]
        self._marginal = src[~is_central], dst[~is_central] - dg.num_central

    def forward(self, h: Tensor) -> Tensor:
        """[num_local, in_dim] -> [num_local, out_dim]."""
        z = self.lin(h)
        flight = self.dg.send(z)
        first = self.dg.num_central
        central = self._attend(z, z[:first], *self._central)
        marginal = self._attend(torch.cat([z, flight.receive()]), z[first:], *self._marginal)
        return torch.cat([central, marginal]) + self.bias

    def _attend(self, source: Tensor, target: Tensor, src: Tensor, dst: Tensor) -> Tensor:
        """Attention-weighted sums of rows of `source` for each row of `target`.

        Returns:
            float tensor [len(target), out_dim].
        """
        num_rows = len(target)
        source = source.view(len(source), self.heads, self.att_src.shape[1])
        target = target.view(num_rows, self.heads, self.att_src.shape[1])
        logit = (source * self.att_src).sum(-1)[src] + (target * self.att_dst).sum(-1)[dst]
        logit = F.leaky_relu(logit, self.slope)
        index = dst[:, None].expand_as(logit)
        top = logit.new_full((num_rows, self.heads), -torch.inf)
        top = top.scatter_reduce(0, index, logit.detach(), "amax")
        weight = (logit - top[dst]).exp()
        total = weight.new_zeros(num_rows, self.heads).index_add(0, dst, weight)
        weight = weight / total[dst]
        summed = source.new_zeros(target.shape)
        summed = summed.index_add(0, dst, weight[:, :, None] * source[src])
        return summed.flatten(1)


class Dropout(nn.Module):
    """Zeroes a share `p` of the values in training and scales the others by 1 / (1 - p).

    torch's own dropout draws one random number per value on a CPU (17 ns each on one core, a fifth
    of a GCN's step). This one splits each 64-bit draw of the same generator into four, so `p` is
    rounded to a multiple of 2^-16.

    Args:
        p: share of values to drop, in [0, 1).
    """

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, h: Tensor) -> Tensor:
        """Any shape; unchanged in evaluation."""
        if not self.training or not self.p or h.is_cuda:
            return F.dropout(h, self.p, self.training)
        draws = torch.empty(-(-h.numel() // 4), dtype=torch.int64).random_(-(2**63), None)
        threshold = round(self.p * 2**16) - 2**15
        keep = draws.view(torch.int16)[: h.numel()].view(h.shape) >= threshold
        return h * keep.to(h.dtype).mul_(1 / (1 - self.p))


def _stack(
    dg: DistGraph, conv: type[nn.Module], dims: list[int], norm: str | None, dropout: float
) -> nn.Sequential:
    if norm not in ("layer", None):
        raise ConfigError(f"norm: expected 'layer' or None, got {norm!r}")
    if len(dims) < 2:
        raise ConfigError(f"dims: expected at least an input and an output width, got {dims}")
    modules: list[nn.Module] = []
    for layer, (in_dim, out_dim) in enumerate(pairwise(dims)):
        modules += _between(in_dim, norm, dropout) if layer else []
        modules.append(conv(dg, in_dim, out_dim))
    return nn.Sequential(*modules)


def _between(dim: int, norm: str | None, dropout: float) -> list[nn.Module]:
    """The modules between two layers."""
    modules: list[nn.Module] = [nn.LayerNorm(dim)] if norm else []
    return [*modules, nn.ReLU(), *([Dropout(dropout)] if dropout else [])]


def gcn(
    dg: DistGraph, dims: list[int], *, norm: str | None = "layer", dropout: float = 0.5
) -> nn.Sequential:
    """GCN layers of the given widths, with norm, ReLU and dropout between them."""
    return _stack(dg, GCNConv, dims, norm, dropout)


def sage(
    dg: DistGraph, dims: list[int], *, norm: str | None = "layer", dropout: float = 0.5
) -> nn.Sequential:
    """GraphSAGE-mean layers of the given widths, with norm, ReLU and dropout between them."""
    return _stack(dg, SAGEConv, dims, norm, dropout)


def gin(
    dg: DistGraph, dims: list[int], *, norm: str | None = "layer", dropout: float = 0.5
) -> nn.Sequential:
    """GIN layers of the given widths, with norm, ReLU and dropout between them."""
    return _stack(dg, GINConv, dims, norm, dropout)


def gat(
    dg: DistGraph, dims: list[int], *, norm: str | None = "layer", dropout: float = 0.5
) -> nn.Sequential:
    """GAT layers of the given widths: 4 heads, which must divide hidden widths; 1 in the last."""
    layers = _stack(dg, GATConv, dims[:-1], norm, dropout) if len(dims) > 2 else []
    between = _between(dims[-2], norm, dropout) if len(dims) > 2 else []
    return nn.Sequential(*layers, *between, GATConv(dg, dims[-2], dims[-1], heads=1))
