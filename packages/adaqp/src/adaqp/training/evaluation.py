"""The area under the ROC curve, exactly."""

from jaxtyping import Shaped
from torch import Tensor

from shared.errors import DataError

__all__ = ["auc"]


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
