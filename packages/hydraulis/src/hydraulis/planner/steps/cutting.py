"""Cuts a shuffled epoch into steps, so that every document is in exactly one of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from math import ceil

import numpy as np

from hydraulis.planner.steps.bins import fill_bins, split_bins
from shared.errors import ConfigError

__all__ = ["count_steps", "cut_epoch", "cut_steps"]

_FILLED = 0.85
"""Share of a step's room that is filled: what lets micro-batches of equal seconds have unequal tokens."""
_MOST_TRIED = 64
"""Emptiest steps that are tried for a document that no later step has room for."""


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


def count_steps(lengths: np.ndarray, documents: np.ndarray, cap: int, num_slots: int) -> int:
    """Counts the steps that hold all documents in any order, each step at least one document.

    Args:
        lengths: tokens of all documents, none above the cap.
        documents: numbers of those that are trained on.
        cap: most tokens of a micro-batch.
        num_slots: micro-batches of a step over all ranks.
    """
    by_tokens = ceil(int(lengths[documents].sum()) / (_FILLED * cap * num_slots))
    by_packing = ceil(len(fill_bins(lengths, documents, cap)) / num_slots)
    return min(max(by_tokens, by_packing), len(documents))


def cut_epoch(
    lengths: np.ndarray, order: np.ndarray, num_steps: int, cap: int, num_slots: int
) -> list[np.ndarray]:
    """Cuts documents into exactly so many steps; each step's fit into its micro-batches.

    Documents are taken in order, about as many tokens a step. Those that do not fit at the end go to
    earlier steps that have room. Where packing leaves too little room for that, all documents are packed
    at once, and the micro-batches are shuffled by `order` in their place.

    Args:
        lengths: tokens of all documents, none above the cap.
        order: documents in the order in which they are taken.
        num_steps: steps, at least `count_steps`.
        cap: most tokens of a micro-batch.
        num_slots: micro-batches of a step over all ranks.
    """
    steps, waiting = _cut_in_order(lengths, order, num_steps, cap, num_slots)
    if _add_waiting(lengths, steps, waiting, cap, num_slots):
        return [np.array(step) for step in steps]
    bins = split_bins(fill_bins(lengths, order, cap), num_steps)
    # The order is a shuffle already: a micro-batch comes where its first document came in it.
    rank_in_order = np.empty(len(lengths), dtype=np.int64)
    rank_in_order[order] = np.arange(len(order))
    bins.sort(key=lambda part: rank_in_order[part].min())
    return [
        np.array([document for part in bins[number::num_steps] for document in part])
        for number in range(num_steps)
    ]


def _cut_in_order(
    lengths: np.ndarray, order: np.ndarray, num_steps: int, cap: int, num_slots: int
) -> tuple[list[list[int]], list[int]]:
    """Steps of consecutive documents, and the documents that the last one has no room for."""
    waiting, tokens = deque(order.tolist()), int(lengths[order].sum())
    steps = []
    for num_left in range(num_steps, 0, -1):
        aim, taken, held = tokens / num_left, [], 0
        while len(waiting) >= num_left and (not taken or held + lengths[waiting[0]] / 2 <= aim):
            taken.append(waiting.popleft())
            held += int(lengths[taken[-1]])
        while held > cap * num_slots or not _fits(lengths, taken, cap, num_slots):
            waiting.appendleft(taken.pop())
            held -= int(lengths[waiting[0]])
        tokens -= held
        steps.append(taken)
    return steps, list(waiting)


def _add_waiting(
    lengths: np.ndarray, steps: list[list[int]], waiting: list[int], cap: int, num_slots: int
) -> bool:
    """Adds documents to the emptiest steps that have room; whether all found some."""
    for document in sorted(waiting, key=lambda document: -lengths[document]):
        emptiest = np.argsort([int(lengths[step].sum()) for step in steps], kind="stable")
        for number in emptiest[:_MOST_TRIED].tolist():
            if _fits(lengths, [*steps[number], document], cap, num_slots):
                steps[number].append(document)
                break
        else:
            return False
    return True


def _fits(lengths: np.ndarray, documents: list[int], cap: int, num_slots: int) -> bool:
    return len(fill_bins(lengths, np.array(documents), cap)) <= num_slots
