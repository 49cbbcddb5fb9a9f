"""A rank's state as a list of entries: a parameter each, with its optimizer state, and last the rest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from swift.training.rest import Rest
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
    """

    def __init__(self, names: Sequence[str], optimizer: Undoable, rest: Rest) -> None:
        self.optimizer, self.rest = optimizer, rest
        self.rest_version = 0
        self._names = list(names)

    @property
    def last(self) -> int:
        """The entry of the rest."""
        return len(self._names)

    def versions(self) -> list[int]:
        """See `Trainable`."""
        return [*self.optimizer.marks, self.rest_version]

    def state_of(self, entry: int) -> dict[str, Tensor]:
        """See `Trainable`."""
        if entry == self.last:
            return {"rest": self.rest.pack()}
        return self._named(entry, self.optimizer.state_of(entry))

    def prepare(self, entry: int) -> dict[str, Tensor]:
        """See `Trainable`."""
        return self._named(entry, self.optimizer.prepare(entry))

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
        if len(tensors) < len(places):
            # Its givers have no state of it, as it never had a gradient.
            self.optimizer.optimizer.state.pop(self.optimizer.parameters[entry], None)
        self.optimizer.mark(entry, version)

    def _named(self, entry: int, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {f"{self._names[entry]}/{key}": one for key, one in tensors.items()}
