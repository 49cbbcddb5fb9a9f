"""Ring attention by document: keys and values pass round the ranks, and each adds its part.

Every document is cut into twice as many chunks as there are ranks; rank r has chunk r from its beginning
and chunk r from its end, so that causal work is the same on all (head-tail split, as in Megatron-LM's
context parallelism). Chunks need not be equal, and short documents leave some empty: nothing is padded.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hydraulis.runtime.documents import attend_piece, attend_piece_backward, wide
from shared.comms import Group, PendingRounds, Round, post_rounds

__all__ = ["attend_ring", "chunks"]


def chunks(length: int, rank: int, size: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Begin and end of a rank's two chunks of a document."""
    early, late = rank, 2 * size - 1 - rank
    return tuple(  # type: ignore[return-value]
        (length * one // (2 * size), length * (one + 1) // (2 * size)) for one in (early, late)
    )


class _Pair(NamedTuple):
    """A document's two chunks in a rank's own tokens: where the first begins, their border, the end."""

    begin: int
    border: int
    end: int


def _pairs(lengths: tuple[int, ...], rank: int, size: int) -> list[_Pair]:
    found, begin = [], 0
    for length in lengths:
        (a, b), (c, d) = chunks(length, rank, size)
        found.append(_Pair(begin, begin + b - a, begin + b - a + d - c))
        begin = found[-1].end
    return found


class _Part(NamedTuple):
    """Queries of this rank over keys of a peer."""

    queries: slice
    keys: slice
    is_causal: bool


def _parts(mine: list[_Pair], theirs: list[_Pair], rank: int, peer: int) -> Iterator[_Part]:
    """What is to be computed where this rank's tokens meet a peer's."""
    for own, other in zip(mine, theirs, strict=True):
        early, late = slice(own.begin, own.border), slice(own.border, own.end)
        if peer == rank:
            found = [(early, early, True), (late, early, False), (late, late, True)]
        elif peer < rank:  # its early chunk is before both of ours, its late one behind both
            found = [(slice(own.begin, own.end), slice(other.begin, other.border), False)]
        else:  # both of its chunks are between ours
            found = [(late, slice(other.begin, other.end), False)]
        for queries, keys, is_causal in found:
            if queries.stop > queries.start and keys.stop > keys.start:
                yield _Part(queries, keys, is_causal)


def attend_ring(
    q: Tensor, k: Tensor, v: Tensor, lengths: tuple[int, ...], scale: float, group: Group
) -> Tensor:
    """Causal attention inside documents that lie over a group's ranks; differentiable.

    Args:
        q: this rank's queries [heads, tokens, head dim], of each document its two chunks.
        k, v: its keys and values [key heads, tokens, head dim].
        lengths: tokens of the whole documents.
        scale: of the products.
        group: the ring, by rank.
    """
    return _Ring.apply(q, k, v, lengths, scale, group)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, lengths: tuple[int, ...], scale: float,
        group: Group,
    ) -> Tensor:  # fmt: skip
        out = torch.zeros_like(q, dtype=wide(q.dtype))
        lse = torch.full(q.shape[:2], -torch.inf, dtype=out.dtype, device=q.device)
        for peer, pair in _Passing(group, lengths, torch.stack((k, v))):
            for part in _meet(lengths, group, peer):
                found, sums = attend_piece(
                    q[:, part.queries], pair[0, :, part.keys], pair[1, :, part.keys], scale,
                    is_causal=part.is_causal,
                )  # fmt: skip
                before = lse[:, part.queries]
                merged = torch.logaddexp(before, sums.to(lse.dtype))
                out[:, part.queries] *= (before - merged).exp_()[..., None]
                out[:, part.queries] += found * (sums - merged).exp_()[..., None]
                lse[:, part.queries] = merged
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.lengths, ctx.scale, ctx.group = lengths, scale, group
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (grad,) = grads
        q, k, v, out, lse = ctx.saved_tensors
        group, lengths = ctx.group, ctx.lengths
        grad = grad.contiguous()
        of_q = torch.zeros_like(q, dtype=lse.dtype)
        travelling: _Hop | None = None  # the gradients of the keys that this rank meets next
        for peer, pair in _Passing(group, lengths, torch.stack((k, v))):
            of_pair = torch.zeros_like(pair, dtype=lse.dtype)
            for part in _meet(lengths, group, peer):
                found = attend_piece_backward(
                    grad[:, part.queries], q[:, part.queries], pair[0, :, part.keys],
                    pair[1, :, part.keys], out[:, part.queries], lse[:, part.queries], ctx.scale,
                    is_causal=part.is_causal,
                )  # fmt: skip
                of_q[:, part.queries] += found[0]
                of_pair[0, :, part.keys] += found[1]
                of_pair[1, :, part.keys] += found[2]
            if travelling is not None:
                of_pair += travelling.wait()
            # The next rank meets these keys next; from the last one their gradients go home.
            arriving = of_pair.new_empty(
                _shape(of_pair, lengths, (peer - 1) % group.world_size, group)
            )
            travelling = _Hop(group, of_pair, arriving, "ring gradients")
        assert travelling is not None, "a ring has ranks"
        of_k, of_v = travelling.wait().to(k.dtype)
        return of_q.to(q.dtype), of_k, of_v, None, None, None


def _meet(lengths: tuple[int, ...], group: Group, peer: int) -> Iterator[_Part]:
    mine, theirs = (_pairs(lengths, rank, group.world_size) for rank in (group.rank, peer))
    return _parts(mine, theirs, group.rank, peer)


def _shape(pair: Tensor, lengths: tuple[int, ...], peer: int, group: Group) -> tuple[int, ...]:
    """Of keys and values of a peer."""
    return *pair.shape[:2], _pairs(lengths, peer, group.world_size)[-1].end, pair.shape[3]


class _Hop:
    """A message to the next rank, and one of the rank before."""

    def __init__(self, group: Group, sent: Tensor, received: Tensor, phase: str) -> None:
        self._sent, self._received = sent.contiguous(), received
        size, rank = group.world_size, group.rank
        self._pending: PendingRounds | None = None
        if size > 1:
            item = Round(
                send_to=(rank + 1) % size, send=self._sent, recv_from=(rank - 1) % size,
                recv=received,
            )  # fmt: skip
            self._pending = post_rounds(group, [item], phase)

    def wait(self) -> Tensor:
        """What was received; a ring of one rank has what it sent."""
        if self._pending is None:
            return self._sent
        self._pending.wait_all()
        return self._received


class _Passing:
    """Keys and values of every rank, this one's first; the next ones are on their way meanwhile."""

    def __init__(self, group: Group, lengths: tuple[int, ...], own: Tensor) -> None:
        self._group, self._lengths, self._own = group, lengths, own

    def __iter__(self) -> Iterator[tuple[int, Tensor]]:
        group, pair = self._group, self._own
        for step in range(group.world_size):
            peer = (group.rank - step) % group.world_size
            hop = None
            if step + 1 < group.world_size:
                after = (peer - 1) % group.world_size
                hop = _Hop(
                    group, pair, pair.new_empty(_shape(pair, self._lengths, after, group)), "ring"
                )
            yield peer, pair
            if hop is not None:
                pair = hop.wait()
