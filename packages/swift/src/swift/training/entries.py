"""A rank's state as a list of entries: a parameter each, with its optimizer state, and last the rest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from swift.training.rest import Rest
from swift.undo.torch_step import local
from swift.undo.undoable import Undoable

__all__ = ["Entries"]


class Entries:
    """The state of a module and its optimizer, as `Trainable` describes it.

    Args:
        names: of the optimizer's parameters, in its order; unique over all ranks with other states.
        optimizer: of the parameters.
        rest: buffers, hyperparameters and what else a step changes.

    Attributes:
        rest_version: steps that the rest has had.
        constants: parameters that no step changes and that a newcomer does not have, by name: entries
            between those of the optimizer and the rest. They are replaced, not added or removed.
        prefix: put before all names.
    """

    def __init__(self, names: Sequence[str], optimizer: Undoable, rest: Rest) -> None:
        self.optimizer, self.rest = optimizer, rest
        self.rest_version = 0
        self.constants: dict[str, Tensor] = {}
        self.prefix = ""
        self._names = list(names)

    @property
    def last(self) -> int:
        """The entry of the rest."""
        return len(self._names) + len(self.constants)

    def versions(self) -> list[int]:
        """See `Trainable`."""
        return [*self.optimizer.marks, *[self.rest_version] * (len(self.constants) + 1)]

    def undo(self, entries: Sequence[int]) -> None:
        """See `Trainable`."""
        self.optimizer.undo_only([entry for entry in entries if entry < len(self._names)])
        if self.last in entries:
            self.rest_version -= 1
            self.rest.restore(self.rest_version)

    def state_of(self, entry: int) -> dict[str, Tensor]:
        """See `Trainable`."""
        if entry == self.last:
            return {"rest": self.rest.pack()}
        if entry >= len(self._names):
            return self._constant(entry)
        return self._named(entry, self.optimizer.state_of(entry))

    def prepare(self, entry: int) -> dict[str, Tensor]:
        """See `Trainable`."""
        if entry >= len(self._names):
            return self._constant(entry)
        return self._named(entry, self.optimizer.prepare(entry))

    def allocate(self, entry: int) -> dict[str, Tensor]:
        """See `Trainable`."""
        if entry >= len(self._names):
            return {name: torch.empty_like(one) for name, one in self._constant(entry).items()}
        return self._named(entry, self.optimizer.allocate(entry))

    def fill(self, entry: int, tensors: Mapping[str, Tensor], version: int) -> None:
        """See `Trainable`."""
        if entry == self.last:
            self.rest.load(tensors["rest"])
            self.rest_version = version
            return
        places = self.prepare(entry)
        for name, tensor in tensors.items():
            if places[name].data_ptr() != tensor.data_ptr():
                places[name].copy_(tensor)
        if entry >= len(self._names):
            return
        if len(tensors) < len(places):
            # Its givers have no state of it, as it never had a gradient.
            self.optimizer.optimizer.state.pop(self.optimizer.parameters[entry], None)
        self.optimizer.mark(entry, version)

    def _constant(self, entry: int) -> dict[str, Tensor]:
        name = list(self.constants)[entry - len(self._names)]
        return {f"{self.prefix}{name}/constant": local(self.constants[name])}

    def _named(self, entry: int, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {f"{self.prefix}{self._names[entry]}/{key}": one for key, one in tensors.items()}
