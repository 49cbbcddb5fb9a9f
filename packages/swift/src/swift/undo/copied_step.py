"""Steps that torch takes and copies of all it changes take back."""

from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from swift.undo.applied_step import AppliedStep, UndoMemory
from swift.undo.torch_step import Group, state_tensors, step_only

__all__ = ["CopiedStep", "Copies"]


@dataclass(slots=True)
class Copies:
    """Copies of tensors by name, in memory that is used again."""

    tensors: dict[str, Tensor] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        """Bytes held."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def take(self, live: dict[str, Tensor]) -> None:
        """Copy these tensors in place of what was kept."""
        for name in set(self.tensors) - set(live):
            del self.tensors[name]
        for name, tensor in live.items():
            held = self.tensors.get(name)
            if held is not None and (held.shape, held.dtype) == (tensor.shape, tensor.dtype):
                held.copy_(tensor)
            else:
                self.tensors[name] = tensor.clone()


class CopiedStep(AppliedStep):
    """A step of any optimizer."""

    def __init__(
        self,
        optimizer: Optimizer,
        group: Group,
        parameter: Parameter,
        buffers: UndoMemory | None = None,
    ) -> None:
        super().__init__(optimizer, group, parameter)
        self.copies = buffers if isinstance(buffers, Copies) else Copies()
        self.buffers = self.copies
        self._values: dict[str, Any] = {}

    def run(self) -> None:
        """Copy what the step may change, and let torch step."""
        self.copy()
        step_only(self.optimizer, self._group, [self.parameter])

    def copy(self) -> None:
        """Copy what the step may change."""
        state = self.optimizer.state.get(self.parameter, {})
        self._values = {
            name: deepcopy(value) for name, value in state.items() if not isinstance(value, Tensor)
        }
        self.copies.take(state_tensors(self.optimizer, self.parameter))

    def restore(self, grad: Tensor) -> None:
        """See `AppliedStep`."""
        live = state_tensors(self.optimizer, self.parameter)
        for name, tensor in self.copies.tensors.items():
            live[name].copy_(tensor)
        if not self.first:
            state = self.optimizer.state[self.parameter]
            for name in set(state) - set(self._values) - set(self.copies.tensors):
                del state[name]
            state.update(self._values)
