"""What the forms of Adam's step read and write."""

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

__all__ = ["BLOCK", "AdamTensors", "Residual"]

# Elements whose escapes lie one after another.
BLOCK = 512


class AdamTensors(NamedTuple):
    """A parameter and what its step reads and writes: [n] each, of one type, contiguous."""

    param: Tensor
    grad: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor


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

    @property
    def num_bytes(self) -> int:
        """Bytes held."""
        return self.codes.nbytes + self.bases.nbytes + self.escapes.nbytes

    def fits(self, param: Tensor) -> bool:
        """Whether it has room for the step of a parameter of this size, type and device."""
        return (
            self.codes.shape[1] == param.numel()
            and self.escapes.dtype == param.dtype
            and self.codes.device == param.device
        )
