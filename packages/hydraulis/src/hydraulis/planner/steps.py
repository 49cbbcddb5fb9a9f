"""A step's documents to ranks and micro-batches, as many on every rank."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from hydraulis.config import Cost, Replica
from hydraulis.planner.assignment import AssignmentProblem, assign
from hydraulis.planner.dispatch import dispatch
from hydraulis.planner.packing import pack
from shared.errors import ConfigError

__all__ = ["SYNCS", "cut_evenly", "cut_steps", "plan_ranks", "plan_slots"]

SYNCS = ("step", "micro-batch")
"""Where ranks wait for one another: after a step (DDP without synchronisation in between), or after
each micro-batch (FSDP, whose parameters are gathered by all)."""

_MOST_MORE = 8
"""Micro-batches a rank beyond the fewest that are tried before giving up."""


def cut_steps(
    lengths: np.ndarray, order: np.ndarray, tokens_per_step: int, num_ranks: int
) -> Iterator[np.ndarray]:
    """Cuts documents in order into steps of so many tokens, each of at least a document a rank.

    What is left at the end goes into the last step, if it is too little for one of its own.

    Args:
        lengths: tokens of the documents.
        order: documents in the order in which they are taken.
        tokens_per_step: tokens of a step, exceeded by part of its last document.
        num_ranks: least documents of a step.
    """
    held: list[int] = []
    tokens = 0
    pending: np.ndarray | None = None
    for document in order.tolist():
        held.append(document)
        tokens += int(lengths[document])
        if tokens >= tokens_per_step and len(held) >= num_ranks:
            if pending is not None:
                yield pending
            pending, held, tokens = np.array(held), [], 0
    if len(held) >= num_ranks:
        if pending is not None:
            yield pending
        yield np.array(held)
    elif pending is not None:
        yield np.concatenate((pending, np.array(held, dtype=pending.dtype)))
    elif held:
        raise ConfigError(
            f"expected at least a document for each of {num_ranks} ranks, got {len(held)}; use fewer "
            f"ranks or more documents"
        )


def plan_ranks(
    lengths: Sequence[int] | np.ndarray,
    num_ranks: int,
    cost: Cost,
    cap: int,
    sync: str = "step",
) -> list[list[list[int]]]:
    """Micro-batches of each rank, none empty, as many on every rank.

    With sync="step" ranks end together; with "micro-batch" the ranks' first micro-batches end
    together, then their second ones, and so on.

    Args:
        lengths: tokens of the step's documents.
        num_ranks: ranks, all alike.
        cost: seconds of a micro-batch.
        cap: most tokens of a micro-batch.
        sync: one of `SYNCS`.

    Returns:
        Indices of documents by rank and micro-batch.

    Raises:
        ConfigError: too few documents for as many micro-batches on every rank, or an unknown `sync`.
    """
    if sync not in SYNCS:
        raise ConfigError(f"sync: expected one of {', '.join(SYNCS)}, got {sync!r}")
    known = np.asarray(lengths)
    if sync == "step":
        shares = dispatch(known, [Replica(cost=cost, cap=cap)] * num_ranks).replica_of
        mine = [np.flatnonzero(shares == rank) for rank in range(num_ranks)]
        packed = [pack(known[share], cost, cap).micro_batches for share in mine]
        count = max(map(len, packed))
        if all(len(share) >= count for share in mine) and count:
            return [
                [
                    share[list(part)].tolist()
                    for part in _split(known[share], found, cost, cap, count)
                ]
                for share, found in zip(mine, packed, strict=True)
            ]
    return _plan_slots(known, num_ranks, cost, cap)


def _split(
    lengths: np.ndarray, found: tuple[tuple[int, ...], ...], cost: Cost, cap: int, count: int
) -> list[Sequence[int]]:
    """As many micro-batches as another rank needs."""
    if len(found) == count:
        return list(found)
    bins = _bins(lengths, cost, cap, count)
    assert bins is not None, "fewer micro-batches held it"
    return bins


def plan_slots(
    lengths: np.ndarray,
    num_ranks: int,
    cost: Cost,
    cap: int,
    slots: int,
    *,
    may_be_empty: bool = False,
) -> list[list[list[int]]] | None:
    """Exactly so many micro-batches on every rank: all alike in seconds, or sorted so that a slot's are.

    Args:
        lengths: tokens of the step's documents.
        num_ranks: ranks, all alike.
        cost: seconds of a micro-batch.
        cap: most tokens of a micro-batch.
        slots: micro-batches of a rank.
        may_be_empty: whether micro-batches may be left without documents.

    Returns:
        Indices of documents by rank and slot; None if they do not fit.
    """
    found = _bins(lengths, cost, cap, slots * num_ranks, may_be_empty=may_be_empty)
    if found is None:
        return None
    found.sort(key=lambda part: -_bin_s(lengths, cost, part))
    loads = [0.0] * num_ranks
    ranks: list[list[list[int]]] = [[] for _ in range(num_ranks)]
    for slot in range(slots):
        parts = found[slot * num_ranks : (slot + 1) * num_ranks]
        # The rank that has had least takes the largest of a slot.
        for part, rank in zip(parts, np.argsort(loads, kind="stable"), strict=True):
            ranks[rank].append(list(part))
            loads[rank] += _bin_s(lengths, cost, part)
    return ranks


def cut_evenly(
    lengths: np.ndarray,
    order: np.ndarray,
    num_steps: int,
    plan: Callable[[np.ndarray], list[list[list[int]]] | None],
) -> Iterator[tuple[np.ndarray, list[list[list[int]]]]]:
    """Cuts documents in order into exactly so many steps of about as many tokens, each planned.

    Documents that do not fit into a step any more begin the next one.

    Args:
        lengths: tokens of the documents.
        order: documents in the order in which they are taken, at least as many as steps.
        num_steps: steps.
        plan: micro-batches of a step of documents; None if they do not fit.

    Yields:
        Each step's documents and plan; together they may lack the end of `order`, where the last step
        is full.
    """
    waiting, tokens = deque(order.tolist()), int(lengths[order].sum())
    for left in range(num_steps, 0, -1):
        aim, taken, held = tokens / left, [], 0.0
        while len(waiting) >= left and (not taken or held + lengths[waiting[0]] / 2 <= aim):
            taken.append(waiting.popleft())
            held += lengths[taken[-1]]
        while (found := plan(np.array(taken))) is None:
            waiting.appendleft(taken.pop())
        tokens -= int(lengths[taken].sum())
        yield np.array(taken), found


def _bin_s(lengths: np.ndarray, cost: Cost, part: Sequence[int]) -> float:
    return cost.micro_batch_s(lengths[list(part)])


def _bins(
    lengths: np.ndarray, cost: Cost, cap: int, count: int, *, may_be_empty: bool = False
) -> list[Sequence[int]] | None:
    """Exactly so many micro-batches, all alike in seconds; None if they do not fit."""
    seconds = cost.sequence_s(lengths)
    found = assign(
        AssignmentProblem(
            seconds=np.ascontiguousarray(np.broadcast_to(seconds[:, None], (len(lengths), count))),
            warm_up=np.zeros(count),
            fits=np.ones((len(lengths), count), dtype=bool),
            tokens=lengths.astype(float),
            room=np.full(count, float(cap)),
        )
    )
    if found is None or (len(np.unique(found)) < count and not may_be_empty):
        return None
    return [np.flatnonzero(found == number).tolist() for number in range(count)]


def _plan_slots(lengths: np.ndarray, num_ranks: int, cost: Cost, cap: int) -> list[list[list[int]]]:
    """The fewest micro-batches that hold all, as many on every rank."""
    fewest = max(1, -(-int(lengths.sum()) // (cap * num_ranks)))
    for slots in range(fewest, fewest + _MOST_MORE):
        if slots * num_ranks > len(lengths):
            break
        found = plan_slots(lengths, num_ranks, cost, cap, slots)
        if found is not None:
            return found
    raise ConfigError(
        f"expected documents for as many micro-batches on each of {num_ranks} ranks, none above {cap} "
        f"tokens, got {len(lengths)} documents of {int(lengths.sum())} tokens; use a larger cap, more "
        f"tokens a step or fewer ranks"
    )
