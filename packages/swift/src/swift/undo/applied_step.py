"""A step that one parameter has had, and what it takes to undo it."""

from copy import deepcopy
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from swift.undo.torch_step import Group, local, numbers, state_tensors

__all__ = ["AppliedStep", "SteppedWithoutGradient", "UndoMemory"]


@runtime_checkable
class UndoMemory(Protocol):
    """Memory that undoing needs and that the next step uses again."""

    @property
    def num_bytes(self) -> int:
        """Bytes held."""
        ...


class AppliedStep:
    """One parameter's step; made just before it, so that it sees the state from before.

    Attributes:
        first: Whether the step made the parameter's state.
        grad: The step's gradient; None: let go.
        buffers: Held for undoing, beside the gradient.
        num_below_zero: Sums of squares that arithmetic undid to below 0, and that are 0 in its place.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        group: Group,
        parameter: Parameter,
        buffers: UndoMemory | None = None,
    ) -> None:
        state = optimizer.state.get(parameter)
        self.optimizer, self.parameter, self.hyper = optimizer, parameter, numbers(group)
        self.first = not any(isinstance(value, Tensor) for value in (state or {}).values())
        # What torch had noted although there was no state yet, so that no trace is left of the step.
        self._noted: dict[str, Any] | None = (
            deepcopy(dict(state)) if self.first and state is not None else None
        )
        self.grad: Tensor | None = None if parameter.grad is None else local(parameter.grad)
        self.buffers = buffers
        self.num_below_zero = 0
        self._group = group
        self._sealed: dict[str, tuple[int, int]] = {}

    def run(self) -> None:
        """Take the step."""
        raise NotImplementedError

    def seal(self, *, exact: bool) -> None:
        """Note, after the step, the gradient and, for an exact undo, the tensors as they are now."""
        self._sealed = self._versions()
        if not exact:
            self._sealed = {name: at for name, at in self._sealed.items() if name == "grad"}

    def why_not(self, grad: Tensor | None) -> str | None:
        """Why the step cannot be undone with this gradient; None if it can."""
        if grad is None:
            return "its gradient is gone"
        if grad is self.grad:
            now = self._versions()
            for name, at in self._sealed.items():
                if now.get(name) != at:
                    return f"{name!r} was changed in place or replaced since"
        return None

    def undo(self, grad: Tensor | None) -> None:
        """Restore the parameter and torch's state of it, with the step's gradient."""
        assert grad is not None, "why_not() comes first"
        self.restore(local(grad))
        if self.first:
            self.optimizer.state.pop(self.parameter, None)
            if self._noted is not None:
                self.optimizer.state[self.parameter] = self._noted

    def restore(self, grad: Tensor) -> None:
        """Restore the values of all tensors that had one before."""
        raise NotImplementedError

    def _versions(self) -> dict[str, tuple[int, int]]:
        tensors = state_tensors(self.optimizer, self.parameter)
        if self.grad is not None:
            tensors["grad"] = self.grad
        return {name: (_address(tensor), tensor._version) for name, tensor in tensors.items()}


class SteppedWithoutGradient(AppliedStep):
    """The step of a parameter that had no gradient, which torch leaves alone."""

    def run(self) -> None:
        """Nothing to do."""

    def why_not(self, grad: Tensor | None) -> None:
        """Nothing stands in the way."""

    def undo(self, grad: Tensor | None) -> None:
        """Nothing to restore."""


def _address(tensor: Tensor) -> int:
    return tensor.data_ptr() if tensor.layout == torch.strided else id(tensor)
