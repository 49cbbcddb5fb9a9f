"""The four sums that a row of logits is reduced to: how parts merge, and what the whole says."""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

__all__ = ["Answer", "answer", "merge"]


class Answer(NamedTuple):
    """What a row's sums say.

    Attributes:
        log_probs: of the rows' tokens.
        entropy: of the rows' distributions.
        normalizer: logarithm of the sum of exponentials of logits.
    """

    log_probs: Tensor
    entropy: Tensor
    normalizer: Tensor


def merge(parts: Float[Tensor, "4 parts rows"]) -> Float[Tensor, "4 rows"]:
    """The sums over several parts of a vocabulary, from the sums over each."""
    top = parts[0].amax(0)
    shift = parts[0] - top
    shrunk = shift.exp()
    moment = shrunk * (parts[2] + shift * parts[1])
    return torch.stack([top, (shrunk * parts[1]).sum(0), moment.sum(0), parts[3].sum(0)])


def answer(sums: Float[Tensor, "4 rows"]) -> Answer:
    """What the sums over a whole vocabulary say."""
    top, total, moment, chosen = sums
    log_total = total.log()
    return Answer(chosen - top - log_total, log_total - moment / total, top + log_total)
