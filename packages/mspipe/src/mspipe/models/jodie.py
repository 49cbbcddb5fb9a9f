"""JODIE: a recurrent memory that drifts with time."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from mspipe.data.sampler import Sampled
from mspipe.models.base import Updated
from mspipe.models.recurrent import RecurrentModel

__all__ = ["JODIE"]


class JODIE(RecurrentModel):
    """A plain recurrent cell over mail, and a state that drifts over time (arXiv 1908.01207).

    The embedding is LN(s) (1 + w (t - t of s) / (t + 1) + b), as in TGL, where t counts from the
    stream's first event.

    Args:
        dim: width of states and embeddings.
        edge_dim: width of an event's features.
        time_dim: width of encoded time; `dim` by default.
    """

    def __init__(self, dim: int = 100, edge_dim: int = 0, *, time_dim: int | None = None) -> None:
        super().__init__(dim, edge_dim, dim if time_dim is None else time_dim, nn.RNNCell)
        self.norm = nn.LayerNorm(dim)
        self.drift = nn.Linear(1, dim)
        nn.init.normal_(self.drift.weight, std=1.0)
        nn.init.normal_(self.drift.bias, std=1.0)

    def embed(self, sampled: Sampled, updated: Updated, edge_rows: Tensor) -> Tensor:
        """The states of the roots, drifted to their times."""
        del edge_rows
        roots = sampled.roots.to(updated.memory.device)
        t = sampled.root_times.to(updated.times.device)
        since_begin = (t - sampled.begin).clamp(min=0)
        since = ((t - updated.times[roots]) / (since_begin + 1)).float()
        return self.norm(F.embedding(roots, updated.memory)) * (1 + self.drift(since[:, None]))
