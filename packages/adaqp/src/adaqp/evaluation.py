"""Scores of node classification: accuracy, micro-averaged F1, area under the ROC curve."""

from jaxtyping import Float, Int64, Shaped
from torch import Tensor

from shared.errors import DataError

__all__ = ["accuracy", "auc", "micro_f1"]


def accuracy(logits: Float[Tensor, "rows classes"], label: Int64[Tensor, " rows"]) -> float:
    """Share of rows whose largest logit is their label's, 0 to 1; NaN without rows."""
    return float((logits.argmax(dim=1) == label).double().mean())


def micro_f1(
    logits: Float[Tensor, "rows classes"], target: Shaped[Tensor, "rows classes"]
) -> float:
    """F1 over all (row, class) pairs, a logit above 0 predicting the class.

    Returns:
        0 to 1; 0 where nothing is true and nothing predicted.
    """
    predicted, true = logits > 0, target > 0.5
    hits = int((predicted & true).sum())
    total = int(predicted.sum()) + int(true.sum())
    return 2 * hits / total if total else 0.0


def auc(score: Shaped[Tensor, " rows"], label: Shaped[Tensor, " rows"]) -> float:
    """Chance that a positive row scores above a negative one, ties counting half.

    O(rows log rows), exact: ranks are whole or half numbers.

    Args:
        score: [rows], higher means positive.
        label: 0/1 [rows].

    Raises:
        DataError: a score is NaN, or all rows are of one class.
    """
    positive = label > 0.5
    num_positive = int(positive.sum())
    num_negative = len(label) - num_positive
    if not num_positive or not num_negative:
        raise DataError(
            f"label: expected both classes, got {num_positive} positive and "
            f"{num_negative} negative rows"
        )
    if score.is_floating_point() and score.isnan().any():
        raise DataError(
            f"score of row {int(score.isnan().nonzero()[0])}: expected a number, got nan"
        )
    _, value, count = score.unique(return_inverse=True, return_counts=True)
    # Tied rows share the mean of the ranks they take up; doubled, it is an integer.
    double_rank = 2 * count.cumsum(0) - count + 1
    rank_sum = int(double_rank[value][positive].sum())
    wins = rank_sum - num_positive * (num_positive + 1)
    return wins / (2 * num_positive * num_negative)
