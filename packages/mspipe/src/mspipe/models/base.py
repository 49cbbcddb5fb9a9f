"""The interface between pipeline and models, and the parts that all models share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

import torch
from jaxtyping import Float, Float64, Int64, Shaped
from torch import Tensor, nn
from torch.nn import functional as F

from mspipe.data.sampler import Sampled
from mspipe.memory.row_layout import NO_MAIL, State
from shared.errors import ConfigError

__all__ = ["LinkHead", "MemoryModel", "TimeEncoding", "Updated", "last_events", "mail_dim"]

_DECADES = 9


def mail_dim(dim: int, edge_dim: int = 0) -> int:
    """Width of a message: both ends' states and the event's features."""
    return 2 * dim + edge_dim


class Updated(NamedTuple):
    """States of a batch's rows once their mail is applied.

    Attributes:
        memory: float32 [num_rows, dim], with gradients.
        times: float64 [num_rows].
    """

    memory: Float[Tensor, "num_rows dim"]
    times: Float64[Tensor, " num_rows"]


class TimeEncoding(nn.Module):
    """cos(w dt) with w_i = 10^(-9 i / (dim - 1)), after TGAT (arXiv 2002.07962).

    The frequencies are not learned, as in GraphMixer (arXiv 2302.11636): where spans are seconds of a
    month, one optimiser step would scramble every phase. Angles are computed in float64.

    Args:
        dim: width of the encoding, at least 1.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        exponents = torch.linspace(0, -_DECADES, dim, dtype=torch.float64)
        self.register_buffer("frequency", 10**exponents)

    def forward(self, spans: Float64[Tensor, " *n"]) -> Float[Tensor, "*n dim"]:
        """Encodes spans of time."""
        frequency = self.get_buffer("frequency")
        return (spans[..., None].double() * frequency).cos().float()


class LinkHead(nn.Module):
    """Logits of links between embeddings of width `dim`: a perceptron over both."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.src, self.dst, self.out = nn.Linear(dim, dim), nn.Linear(dim, dim), nn.Linear(dim, 1)

    def forward(
        self, src: Float[Tensor, "*n dim"], dst: Float[Tensor, "*m dim"]
    ) -> Float[Tensor, " *both"]:
        """A logit per pair; shapes broadcast."""
        return self.out(F.relu(self.src(src) + self.dst(dst)))[..., 0]


class MemoryModel(nn.Module, ABC):
    """A model with node memory: applies mail, embeds roots, and sends mail.

    Args:
        dim: width of a state and of an embedding.
        edge_dim: columns of an event's features; 0 for none.

    Attributes:
        dim, edge_dim: as given.
        mail_dim: width of a message.
        slots: number of messages that a node keeps.
        fanout: maximum number of neighbours per node that the model uses; 0 for none.
        writes_neighbors: whether rows of nodes other than the ends of events are written.
        head: scores links.

    Raises:
        ConfigError: a size is out of range.
    """

    slots: int = 1
    fanout: int = 0
    writes_neighbors: bool = False

    def __init__(self, dim: int, edge_dim: int) -> None:
        super().__init__()
        if dim < 1 or edge_dim < 0:
            raise ConfigError(
                f"expected dim of at least 1 and edge_dim of at least 0, got {dim}, {edge_dim}"
            )
        self.dim, self.edge_dim = dim, edge_dim
        self.mail_dim = mail_dim(dim, edge_dim)
        self.head = LinkHead(dim)

    @abstractmethod
    def update(self, state: State) -> Updated:
        """Applies the mail of rows to their memory; a row without mail is unchanged."""

    @abstractmethod
    def embed(
        self, sampled: Sampled, updated: Updated, edge_rows: Float[Tensor, "num_sampled edge_dim"]
    ) -> Float[Tensor, "num_roots dim"]:
        """Embeds the roots at their times."""

    def writes(self, sampled: Sampled, num_events: int) -> Int64[Tensor, " num_written"]:
        """Indices of the `sampled.nodes` that a batch writes, ascending: its events' ends."""
        return torch.unique(sampled.roots[: 2 * num_events])

    def num_new(
        self, sampled: Sampled, rows: Int64[Tensor, " num_written"], num_events: int
    ) -> Int64[Tensor, " num_written"]:
        """For each row that is written, the number of its messages that come from the batch."""
        del sampled, num_events
        return torch.ones_like(rows)

    def mail(
        self,
        sampled: Sampled,
        rows: Int64[Tensor, " num_written"],
        state: State,
        updated: Updated,
        event_times: Shaped[Tensor, " num_events"],
        event_rows: Float[Tensor, "num_events edge_dim"],
    ) -> State:
        """New values of `rows`: the updated states, and mail of each node's last event.

        As in TGL, a message is computed when it is sent: [own state | other end's state |
        features], with updated states and without gradients.

        Args:
            sampled: the sample; its first roots are the events' sources, then destinations.
            rows: the result of `writes`.
            state: the rows of `sampled.nodes` as read.
            updated: the result of `update` for them.
            event_times: times of the batch's events, in order of time.
            event_rows: features of the events.
        """
        count = len(event_times)
        memory = updated.memory.detach()
        # The sample is on the CPU, whatever the model's device.
        own, other, event = (
            part.to(memory.device) for part in last_events(sampled, rows.cpu(), count)
        )
        features = event_rows.index_select(0, event.to(event_rows.device))
        mine = memory.index_select(0, own)
        mail = torch.cat([mine, memory.index_select(0, other), features], 1)
        times = event_times.to(updated.times)[event]
        return State(mine, updated.times[own], mail, times)


def last_events(
    sampled: Sampled, rows: Int64[Tensor, " num_written"], num_events: int
) -> tuple[Tensor, Tensor, Tensor]:
    """For each row its last event in a batch: its own row, the other end's row, and the event.

    Events are in order of time; for an event of a node with itself the destination counts.
    """
    src, dst = sampled.roots[: 2 * num_events].view(2, num_events)
    ends = torch.stack([src, dst], 1)
    # By row, the last of its places in the list src 0, dst 0, src 1, dst 1, ...
    last = torch.full((len(sampled.nodes),), -1, dtype=torch.int64, device=ends.device)
    places = torch.arange(2 * num_events, device=ends.device)
    last = last.scatter_reduce(0, ends.flatten(), places, "amax")[rows]
    event = last // 2
    return rows, ends.flip(1).flatten()[last], event


def newest_mail(state: State) -> tuple[Tensor, Tensor]:
    """Which rows have mail, and the time of each row's newest message."""
    times = state.mail_times if state.mail_times.ndim == 1 else state.mail_times.amax(1)
    return times != NO_MAIL, times
