"""Heads that turn embeddings into predictions: of a link between two nodes, of a node's class."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["LinkHead", "NodeHead"]


class LinkHead(nn.Module):
    """w . ReLU(W_s h_src + W_d h_dst), as GNNFlow and TGL score links.

    Args:
        dim: columns of embeddings.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.src = nn.Linear(dim, dim)
        self.dst = nn.Linear(dim, dim)
        self.out = nn.Linear(dim, 1)

    def forward(
        self, src: Float[Tensor, "*src dim"], dst: Float[Tensor, "*dst dim"]
    ) -> Float[Tensor, " *links"]:
        """Logits of links; src [n, 1, dim] with dst [n, k, dim] gives [n, k]."""
        return self.out(F.relu(self.src(src) + self.dst(dst)))[..., 0]


class NodeHead(nn.Module):
    """W_2 ReLU(W_1 h).

    Args:
        dim: columns of embeddings.
        num_classes: columns of logits.
    """

    def __init__(self, dim: int, num_classes: int) -> None:
        super().__init__()
        self.hidden = nn.Linear(dim, dim)
        self.out = nn.Linear(dim, num_classes)

    def forward(self, h: Float[Tensor, "n dim"]) -> Float[Tensor, "n num_classes"]:
        """Logits of each node's classes."""
        return self.out(F.relu(self.hidden(h)))
