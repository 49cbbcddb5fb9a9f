"""Steps that torch takes and an arithmetic inverse takes back, exactly with what it misses."""

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from swift.undo.applied_step import AppliedStep, UndoMemory
from swift.undo.inverses import INVERSES, SQUARES
from swift.undo.residuals import Residuals
from swift.undo.torch_step import Group, state_tensors, step_only

__all__ = ["InvertedStep", "has_inverse"]

_DTYPES = (torch.float32, torch.bfloat16)


def has_inverse(optimizer: Optimizer, parameter: Parameter) -> bool:
    """Whether the optimizer's step has an inverse here, for dense float32 or bfloat16."""
    tensors = [t for name, t in state_tensors(optimizer, parameter).items() if name != "step"]
    grad = parameter.grad
    return (
        type(optimizer) in INVERSES
        and all(tensor.dtype in _DTYPES for tensor in tensors)
        and (grad is None or (grad.layout == torch.strided and grad.dtype in _DTYPES))
    )


class InvertedStep(AppliedStep):
    """A step of SGD, RMSprop or Adagrad."""

    def __init__(
        self,
        optimizer: Optimizer,
        group: Group,
        parameter: Parameter,
        buffers: UndoMemory | None = None,
        *,
        exact: bool,
    ) -> None:
        super().__init__(optimizer, group, parameter)
        self.buffers = self.residuals = None
        if exact:
            self.residuals = buffers if isinstance(buffers, Residuals) else Residuals()
            self.buffers = self.residuals
        self._counts: dict[str, Tensor] = {}

    def run(self) -> None:
        """Let torch step; with residuals, work out now what undoing will miss."""
        before = state_tensors(self.optimizer, self.parameter)
        self._counts = {name: t.clone() for name, t in before.items() if name == "step"}
        if self.residuals is None:
            step_only(self.optimizer, self._group, [self.parameter])
            return
        residuals, grad = self.residuals, self.grad
        assert grad is not None, "a parameter without gradient takes no such step"
        before = {name: tensor.clone() for name, tensor in before.items()}
        step_only(self.optimizer, self._group, [self.parameter])

        def keep(name: str, guess: Tensor) -> Tensor:
            residuals.keep(name, before[name], _not_negative(name, guess).to(before[name].dtype))
            return before[name].float()

        after = state_tensors(self.optimizer, self.parameter)
        INVERSES[type(self.optimizer)](after, grad, self.hyper, self.first, keep)

    def restore(self, grad: Tensor) -> None:
        """See `AppliedStep`."""
        after = state_tensors(self.optimizer, self.parameter)

        def put_back(name: str, guess: Tensor) -> Tensor:
            value = _not_negative(name, guess).to(after[name].dtype)
            if self.residuals is not None:
                value = self.residuals.restore(name, value)
            elif name in SQUARES:
                self.num_below_zero += int((guess < 0).sum())
            after[name].copy_(value)
            return value.float()

        INVERSES[type(self.optimizer)](after, grad, self.hyper, self.first, put_back)
        for name, count in self._counts.items():
            after[name].copy_(count)


def _not_negative(name: str, guess: Tensor) -> Tensor:
    # NaN stays.
    return torch.where(guess < 0, 0.0, guess) if name in SQUARES else guess
