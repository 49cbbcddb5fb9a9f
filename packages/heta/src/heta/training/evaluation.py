"""How good predictions are, on every labelled node of a split."""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Float, Int64
from torch import Tensor, nn

from shared.data.metrics import auc, average_precision
from shared.errors import DataError

__all__ = ["Evaluation", "evaluate_logits"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Quality over the labelled nodes of a split.

    Attributes:
        num_nodes: nodes that were counted.
        loss: mean cross entropy.
        accuracy: share whose largest logit is the label's.
        auc: area under the ROC curve of class 1; None unless there are two classes, both present.
        average_precision: of class 1; None likewise.
    """

    num_nodes: int
    loss: float
    accuracy: float
    auc: float | None
    average_precision: float | None

    def __str__(self) -> str:
        text = f"loss {self.loss:.4f}, accuracy {self.accuracy:.4f}"
        if self.auc is not None and self.average_precision is not None:
            text += f", AUROC {self.auc:.4f}, average precision {self.average_precision:.4f}"
        return f"{text} on {self.num_nodes:,} nodes"


def evaluate_logits(
    logits: Float[Tensor, "nodes classes"], label: Int64[Tensor, " nodes"]
) -> Evaluation:
    """Compares logits with labels, none of which is missing.

    Raises:
        DataError: there is no node.
    """
    if not len(label):
        raise DataError("expected labelled nodes to evaluate on, there are none")
    top = logits.argmax(1)
    roc = precision = None
    if logits.shape[1] == 2 and 0 < int(label.sum()) < len(label):
        score = (logits[:, 1] - logits[:, 0]).numpy()
        is_positive = label.numpy() == 1
        roc = auc(score[is_positive], score[~is_positive])
        precision = average_precision(score[is_positive], score[~is_positive])
    return Evaluation(
        num_nodes=len(label),
        loss=float(nn.functional.cross_entropy(logits.double(), label)),
        accuracy=float((top == label).double().mean()),
        auc=roc,
        average_precision=precision,
    )
