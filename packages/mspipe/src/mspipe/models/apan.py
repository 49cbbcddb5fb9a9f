"""APAN: mail is sent to neighbours in advance, so that embedding a root needs no neighbours."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int64, Shaped
from torch import Tensor, nn
from torch.nn import functional as F

from mspipe.data.sampler import Sampled
from mspipe.memory.row_layout import NO_MAIL, State
from mspipe.models.base import MemoryModel, TimeEncoding, Updated, newest_mail
from shared.errors import ConfigError

__all__ = ["APAN"]


class APAN(MemoryModel):
    """Attention over a mailbox (arXiv 2011.11545).

    s <- ReLU(MLP(LN(sum a v + s))), where a = softmax(leaky_relu(q . k)), q = W_q s and k, v = W [mail |
    Phi(time of the newest mail - its own)]; the embedding is LN(s). An event's message goes to both
    ends and to the neighbours sampled for them; a node keeps the newest `slots`. Departure from
    TGL's form: every receiver's mailbox advances by a slot per message; in TGL only those of the
    ends do, and a neighbour's new message always overwrites its previous one.

    Args:
        dim: width of states and embeddings; a multiple of `num_heads`.
        edge_dim: width of an event's features.
        time_dim: width of encoded time; `dim` by default.
        slots: number of messages that a node keeps.
        fanout: number of neighbours that mail is sent to.
        num_heads: number of attention heads.
        dropout: share of the attention weights that is dropped in training.
        slope: slope of the leaky ReLU on scores for negative ones.
    """

    writes_neighbors = True

    def __init__(
        self,
        dim: int = 100,
        edge_dim: int = 0,
        *,
        time_dim: int | None = None,
        slots: int = 10,
        fanout: int = 10,
        num_heads: int = 2,
        dropout: float = 0.1,
        slope: float = 0.2,
    ) -> None:
        super().__init__(dim, edge_dim)
        time_dim = dim if time_dim is None else time_dim
        if num_heads < 1 or dim % num_heads:
            raise ConfigError(f"expected num_heads to divide dim, got {num_heads} and {dim}")
        if slots < 2 or time_dim < 1:
            raise ConfigError(
                f"expected slots of at least 2 and time_dim of at least 1, got {slots} and {time_dim}"
            )
        self.slots, self.fanout, self.num_heads, self.slope = slots, fanout, num_heads, slope
        self.time = TimeEncoding(time_dim)
        self.query = nn.Linear(dim, dim)
        self.key = nn.Linear(self.mail_dim + time_dim, dim)
        self.value = nn.Linear(self.mail_dim + time_dim, dim)
        self.box_norm = nn.LayerNorm(dim)
        self.mlp = nn.Linear(dim, dim)
        self.norm = nn.LayerNorm(dim)
        self.dropout = nn.Dropout(dropout)

    def update(self, state: State) -> Updated:
        """Updates the states of rows that have mail by attention over their mailboxes."""
        has_mail, newest = newest_mail(state)
        rows = has_mail.nonzero()[:, 0]
        old, times = state.memory[rows], state.mail_times[rows]
        is_there = times != NO_MAIL
        age = (newest[rows, None] - times).masked_fill(~is_there, 0)
        inputs = torch.cat([state.mail[rows], self.time(age)], 2)
        query = self.query(old).unflatten(1, (self.num_heads, -1))
        key = self.key(inputs).unflatten(2, (self.num_heads, -1))
        value = self.value(inputs).unflatten(2, (self.num_heads, -1))
        score = F.leaky_relu(torch.einsum("rhd,rshd->rhs", query, key), self.slope)
        score = score.masked_fill(~is_there[:, None], torch.finfo(score.dtype).min)
        share = self.dropout(score.softmax(-1))
        read = torch.einsum("rhs,rshd->rhd", share, value).flatten(1)
        new = F.relu(self.mlp(self.box_norm(read + old)))
        memory = state.memory.index_copy(0, rows, new)
        return Updated(memory, torch.where(has_mail, newest, state.memory_times))

    def embed(self, sampled: Sampled, updated: Updated, edge_rows: Tensor) -> Tensor:
        """The normalised states of the roots."""
        del edge_rows
        return self.norm(F.embedding(sampled.roots.to(updated.memory.device), updated.memory))

    def writes(self, sampled: Sampled, num_events: int) -> Int64[Tensor, " num_written"]:
        """The ends of events, and the neighbours that mail is sent to."""
        ends = 2 * num_events
        near = sampled.neighbors[: int(sampled.starts[ends])]
        return torch.unique(torch.cat([sampled.roots[:ends], near]))

    def num_new(
        self, sampled: Sampled, rows: Int64[Tensor, " num_written"], num_events: int
    ) -> Int64[Tensor, " num_written"]:
        """For each row that is written, the number of its messages that come from the batch."""
        received = torch.bincount(_deliveries(sampled, num_events)[1], minlength=len(sampled.nodes))
        return received[rows].clamp(max=self.slots)

    def mail(
        self,
        sampled: Sampled,
        rows: Int64[Tensor, " num_written"],
        state: State,
        updated: Updated,
        event_times: Shaped[Tensor, " num_events"],
        event_rows: Float[Tensor, "num_events edge_dim"],
    ) -> State:
        """The states of ends, and the mailboxes of all nodes that receive mail."""
        count, memory, device = len(event_times), updated.memory.detach(), updated.memory.device
        # Only ends get a new state; nodes that only receive mail keep the state that was read.
        is_end = torch.zeros(len(sampled.nodes), dtype=torch.bool, device=device)
        is_end[sampled.roots[: 2 * count].to(device)] = True
        kept = torch.where(is_end[:, None], memory, state.memory)[rows]
        times = torch.where(is_end, updated.times, state.memory_times)[rows]

        root, receiver = _deliveries(sampled, count)
        mail, mail_times = self._delivered(
            state, rows, receiver, root, memory, sampled, event_times, event_rows
        )
        return State(kept, times, mail, mail_times)

    def _delivered(
        self,
        state: State,
        rows: Tensor,
        receiver: Tensor,
        root: Tensor,
        memory: Tensor,
        sampled: Sampled,
        event_times: Tensor,
        event_rows: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """The newest `slots` of each row's old and new messages, oldest first."""
        count, device = len(event_times), memory.device
        ends = sampled.roots[: 2 * count].to(device)
        event = torch.arange(2 * count) % count
        own, other = memory[ends], memory[ends.roll(count)]
        messages = torch.cat([own, other, event_rows[event.to(event_rows.device)]], 1)
        place = torch.full((len(sampled.nodes),), -1, dtype=torch.int64)
        place[rows.cpu()] = torch.arange(len(rows))
        num_old = len(rows) * self.slots
        row = torch.cat([torch.arange(len(rows)).repeat_interleave(self.slots), place[receiver]])
        new_times = event_times.double()[event][root]
        old_times = state.mail_times[rows].flatten().cpu()
        times = torch.cat([old_times, new_times])
        # Stable sorts, least significant key first: by row, by time, then old ones before new ones
        # by event.
        arrival = torch.cat([torch.full((num_old,), -1), event[root]])
        order = arrival.argsort(stable=True)
        order = order[times[order].argsort(stable=True)]
        order = order[row[order].argsort(stable=True)]
        ends_of = torch.bincount(row, minlength=len(rows)).cumsum(0)
        chosen = order[(ends_of[:, None] - self.slots + torch.arange(self.slots))]
        every = torch.cat([state.mail[rows].flatten(0, 1), messages[root.to(device)]])
        return every[chosen.to(device)], times[chosen].to(state.mail_times.device)


def _deliveries(sampled: Sampled, count: int) -> tuple[Tensor, Tensor]:
    """Roots whose messages are sent, and the rows that receive them."""
    # Once to each neighbour, then to the ends, so that of equal times the ends' own messages are
    # kept longest.
    root = torch.arange(2 * count).repeat_interleave(sampled.starts[: 2 * count + 1].diff())
    near, ends = sampled.neighbors[: len(root)], sampled.roots[: 2 * count]
    num_rows = len(sampled.nodes)
    # An event of a node with itself sends one message, not two.
    is_sender = torch.ones(2 * count, dtype=torch.bool)
    is_sender[count:] = ends[:count] != ends[count:]
    is_other = (near != ends[root]) & is_sender[root]
    pairs = torch.unique(root[is_other] * num_rows + near[is_other])
    senders = is_sender.nonzero()[:, 0]
    root = torch.cat([pairs // num_rows, senders])
    receiver = torch.cat([pairs % num_rows, ends[senders]])
    return root, receiver
