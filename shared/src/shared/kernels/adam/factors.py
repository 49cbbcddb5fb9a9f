"""The numbers that a step multiplies by, worked out once in double precision."""

import math
from typing import NamedTuple

from shared.kernels.adam.hyper import Hyper

__all__ = ["Factors", "factors"]


class Factors(NamedTuple):
    """Factors of one step; the forms round each to float32.

    With g = sign * grad + l2 * param, the step is
    exp_avg = (exp_avg or g) + mix * (g - exp_avg),
    exp_avg_sq = exp_avg_sq * keep_sq + (take_sq * g) * g,
    param = param * decay - (step_size * exp_avg) / (sqrt(exp_avg_sq) * root_inverse + eps).
    """

    sign: float
    l2: float
    decay: float
    from_grad: bool
    mix: float
    take: float
    keep_sq: float
    take_sq: float
    step_size: float
    root_inverse: float
    eps: float
    decay_inverse: float
    keep_inverse: float
    keep_sq_inverse: float


def factors(hyper: Hyper, step: int) -> Factors:
    """Factors of step number `step`, the first being 1, with torch's formulas.

    An inverse that does not exist is infinite: what it touches becomes NaN and escapes.
    """
    take = 1 - hyper.beta1
    # As torch's lerp: from the nearer end, so that a weight of 1 gives the gradient itself.
    from_grad = take >= 0.5
    decay = 1 - hyper.lr * hyper.weight_decay if hyper.decoupled else 1.0
    return Factors(
        sign=-1.0 if hyper.maximize else 1.0,
        l2=0.0 if hyper.decoupled else hyper.weight_decay,
        decay=decay,
        from_grad=from_grad,
        mix=-hyper.beta1 if from_grad else take,
        take=take,
        keep_sq=hyper.beta2,
        take_sq=1 - hyper.beta2,
        step_size=hyper.lr / (1 - hyper.beta1**step),
        root_inverse=1 / math.sqrt(1 - hyper.beta2**step),
        eps=hyper.eps,
        decay_inverse=_inverse(decay),
        keep_inverse=_inverse(hyper.beta1),
        keep_sq_inverse=_inverse(hyper.beta2),
    )


def _inverse(factor: float) -> float:
    return 1 / factor if factor else math.inf
