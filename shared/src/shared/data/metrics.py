"""Metrics of link prediction: AP, AUC, and the ranking metrics of TGB's evaluator.

All are exact, in float64. Ranks follow the Temporal Graph Benchmark (arXiv 2307.01026): 1 plus the negatives that score higher,
and half of those that score the same, the mean of the optimistic and the pessimistic rank.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from shared.errors import ConfigError, DataError, DivergenceError

__all__ = ["auc", "average_precision", "hits", "mrr"]


def average_precision(pos: Any, neg: Any) -> float:
    """Sum over thresholds of precision times step in recall; equal scores are one threshold.

    Equals `sklearn.metrics.average_precision_score`, which does not interpolate. O(n log n).

    Args:
        pos: scores of events, any shape, tensor, array or list; higher is likelier.
        neg: scores of negatives, any shape.

    Raises:
        DataError: either is empty, or holds NaN.
    """
    score, is_event = _pooled(pos, neg)
    order = np.argsort(-score, kind="stable")
    score, found = score[order], np.cumsum(is_event[order])
    last = np.append(np.flatnonzero(score[1:] != score[:-1]), len(score) - 1)
    precision = found[last] / (last + 1)
    return float(np.sum(precision * np.diff(found[last], prepend=0)) / found[-1])


def auc(pos: Any, neg: Any) -> float:
    """Area under the ROC curve: the chance that an event scores above a negative, ties counting half.

    O(n log n).

    Args:
        pos: scores of events, any shape, tensor, array or list; higher is likelier.
        neg: scores of negatives, any shape.

    Raises:
        DataError: either is empty, or holds NaN.
    """
    score, is_event = _pooled(pos, neg)
    others = np.sort(score[~is_event])
    # Once below and once not above: a tie is counted in one of the two.
    below = sum(
        int(np.searchsorted(others, score[is_event], side).sum()) for side in ("left", "right")
    )
    return below / (2 * len(others) * int(is_event.sum()))


def mrr(pos: Any, neg: Any) -> float:
    """Mean of one over the rank of each event among its negatives.

    Args:
        pos: [num_events], a score each, tensor, array or list; higher is likelier.
        neg: [num_events, num_negatives] scores of each event's own negatives, or [num_negatives]
            that are every event's.

    Raises:
        DataError: no event, no negative, shapes that do not fit, or NaN.
    """
    return float((1 / _ranks(pos, neg)).mean())


def hits(pos: Any, neg: Any, k: int) -> float:
    """Share of events of rank `k` or better; a rank between two whole ones counts as the worse.

    Args:
        pos: as for `mrr`.
        neg: as for `mrr`.
        k: 1 or more.

    Raises:
        ConfigError: `k` is less than 1.
        DataError: as for `mrr`.
    """
    if k < 1:
        raise ConfigError(f"hits: expected k of 1 or more, got {k}")
    return float((_ranks(pos, neg) <= k).mean())


def _array(name: str, values: Any) -> np.ndarray:
    # bfloat16, which numpy lacks, is widened; no score changes by it.
    if isinstance(values, torch.Tensor):
        values = values.detach().cpu()
        values = (values.double() if values.is_floating_point() else values).numpy()
    array = np.asarray(values)
    if not array.size:
        raise DataError(f"{name}: expected at least one score, got none")
    if array.dtype.kind not in "buif":
        raise DataError(f"{name}: expected numbers, got {array.dtype}")
    if np.isnan(array).any():
        raise DivergenceError(
            f"{name}: expected numbers, got NaN at {np.argwhere(np.isnan(array))[0]}; lower the "
            "learning rate that the model is trained with"
        )
    return array.astype(np.float64)


def _pooled(pos: Any, neg: Any) -> tuple[np.ndarray, np.ndarray]:
    pos, neg = _array("pos", pos).ravel(), _array("neg", neg).ravel()
    return np.concatenate([pos, neg]), np.arange(len(pos) + len(neg)) < len(pos)


def _ranks(pos: Any, neg: Any) -> np.ndarray:
    pos, neg = _array("pos", pos), _array("neg", neg)
    if pos.ndim != 1 or neg.ndim not in (1, 2) or (neg.ndim == 2 and len(neg) != len(pos)):
        raise DataError(
            "expected pos [num_events] and neg [num_events, num_negatives] or [num_negatives], got "
            f"{list(pos.shape)} and {list(neg.shape)}"
        )
    if neg.ndim == 1:
        ascending = np.sort(neg)
        not_above, below = (np.searchsorted(ascending, pos, side) for side in ("right", "left"))
        return 1 + len(neg) - 0.5 * (not_above + below)
    return 1 + 0.5 * ((neg > pos[:, None]).sum(1) + (neg >= pos[:, None]).sum(1))
