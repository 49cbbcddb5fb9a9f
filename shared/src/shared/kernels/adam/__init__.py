"""One fused step of Adam or AdamW, the residual that makes it exactly invertible, and its inverse.

The step is torch's (`torch.optim.Adam`, `AdamW`, without amsgrad), every operation rounded by itself
in float32; torch's own forms differ from it, and from each other, by a few roundings. The inverse is
that of "SWIFT: Expedited Failure Recovery for Large-scale DNN Training" (arXiv 2302.06173). Rounding
loses what the inverse needs, so the step can also store how many units in the last place the inverse
will be off: one byte a value, and the value itself where a byte is too narrow (an escape).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

__all__ = ["BLOCK", "AdamTensors", "Hyper", "Residual", "step", "undo"]

# Elements whose escapes lie one after another.
BLOCK = 512


class AdamTensors(NamedTuple):
    """A parameter and what its step reads and writes: [n] each, of one type, contiguous."""

    param: Tensor
    grad: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Hyper:
    """Hyperparameters of a step, under torch's names.

    Attributes:
        decoupled: Whether the decay acts on the weights (AdamW) or on the gradient (Adam).
    """

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    decoupled: bool
    maximize: bool = False


@dataclass(slots=True)
class Residual:
    """What the inverse of a step misses.

    Attributes:
        codes: int8 [3, n]: units in the last place to add to the inverse's param, exp_avg and
            exp_avg_sq; -128 marks an escape.
        bases: int64 [ceil(n / BLOCK)]: where in `escapes` those of a block begin.
        escapes: [number of escapes], of the tensors' type: within a block those of param, then
            exp_avg, then exp_avg_sq.
    """

    codes: Tensor
    bases: Tensor
    escapes: Tensor
