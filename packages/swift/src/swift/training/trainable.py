"""What the training loop needs of what it trains: `DataParallel`, `Sharded` and `Stage` offer it.

The state of a rank is a list of *entries*: the parameters in the optimizer's order, each with its optimizer
state, and last one entry for the rest (buffers, hyperparameters, schedulers). Each entry has a version, the
number of steps that it has had; a step that is cut off leaves some entries a version ahead of others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from shared.comms import Group

__all__ = ["Fillable", "Load", "Repeat", "Trainable"]


@runtime_checkable
class Fillable(Protocol):
    """Entries that a checkpoint can fill, as `Trainable` describes them."""

    def versions(self) -> list[int]:
        """Steps that each entry has had."""
        ...

    def allocate(self, entry: int) -> dict[str, Tensor]:
        """Tensors to be filled, apart from the state."""
        ...

    def fill(self, entry: int, tensors: Mapping[str, Tensor], version: int) -> None:
        """Takes an entry and its version."""
        ...


Load = Callable[[Fillable, int], None]
"""Fills the state of a replica set, given by its place in `Trainable.replica_sets`."""

Repeat = Callable[[int, int], None]
"""Runs the step function for a step, with the random numbers of a rank."""


@runtime_checkable
class Trainable(Protocol):
    """One rank's part of a training that can lose ranks."""

    def describe(self) -> Mapping[str, Any]:
        """What a rank or spare must have in common with the others: JSON by name, compared for equality.

        Shapes and types of parameters, optimizer and mode, bucket sizes, ... not code or machine, which
        the runtime adds; `can_shrink`: whether training can go on with fewer ranks; `undo_is_exact`: see
        `swift.decide`.
        """
        ...

    def warm(self) -> None:
        """Runs what a first step would have to load or compile, on values of its own.

        A spare, which calls it too, may make memory that it will be filled into.
        """
        ...

    def replica_sets(self, world_size: int) -> list[list[int]]:
        """Ranks that hold the same state, a list a set; together all ranks, each once."""
        ...

    def assign(self, rank: int, world_size: int) -> None:
        """Called before `versions`, once the rank is known or has changed; a stage is built here."""
        ...

    def regroup(self, group: Group) -> None:
        """Takes a new world after a failure; ranks in it may be new. The old group is dead: leave it.

        Called before `versions`, of all ranks, and again if a rank dies in the recovery.
        """
        ...

    def versions(self) -> list[int]:
        """Steps that each entry has had, from what this rank holds now."""
        ...

    def undo(self, entries: Sequence[int]) -> None:
        """Takes back the last step of exactly these entries."""
        ...

    def state_of(self, entry: int) -> dict[str, Tensor]:
        """Name -> live tensor of one entry, as a peer with the same state names them.

        Names are unique over all entries; the parameter comes first. The last entry is one tensor, "rest",
        into which all that is no parameter is packed as bytes.
        """
        ...

    def prepare(self, entry: int) -> dict[str, Tensor]:
        """As `state_of`, with memory for what is not there yet; not called for the last entry."""
        ...

    def allocate(self, entry: int) -> dict[str, Tensor]:
        """As `prepare`, all in contiguous memory of its own: the state stays as it is until `fill`."""
        ...

    def fill(self, entry: int, tensors: Mapping[str, Tensor], version: int) -> None:
        """Takes an entry that a peer or a checkpoint gave, and its version.

        Args:
            entry: which.
            tensors: those of `prepare` filled in place, or those of `allocate`, which are copied. Names
                of optimizer state are missing where the giver has none.
            version: steps that it has had.
        """
        ...

    def begin(self, step: int) -> None:
        """Called before the user's step function: all entries are at version `step`."""
        ...

    def finish(self, step: int) -> str | None:
        """Called after the user's step function: raises where not every entry is at `step` + 1.

        Returns:
            How a step that is repeated differs from what was seen of it before a failure, as a sentence;
            None where it does not, or nothing was seen.

        Raises:
            DataError: the step function has not stepped exactly once.
        """
        ...

    def confirm(self, step: int) -> None:
        """All ranks have all entries at `step`: what undoing needs is let go."""
        ...

    def replay(
        self, target: int, lost: Sequence[int], checkpoint_step: int, load: Load, repeat: Repeat
    ) -> str | None:
        """Rebuilds lost state from logged messages up to version `target`; called on all ranks.

        Args:
            target: at which all other ranks are.
            lost: ranks whose sets were lost whole, and whose logs reach the target.
            checkpoint_step: where the replay begins; 0: as built.
            load: fills the state of one of the replica sets from that checkpoint, on this rank alone.
            repeat: runs the user's step function for one step, as some rank.

        Returns:
            Which logged message is missing or damaged, on all ranks: the loop then goes back to the
            checkpoint. None: the state is at the target.

        Raises:
            DataError: a replayed tensor differs from training's.
        """
        ...

    def find_log_gap(self, target: int, checkpoint_step: int) -> str | None:
        """Why the messages that this rank has kept do not reach `target` from `checkpoint_step`.

        None: they do.
        """
        ...

    def committed(self, step: int) -> None:
        """A checkpoint of `step` is committed by all ranks: logs before it may go; said again after a recovery."""
        ...

    def close(self) -> None:
        """All ranks have done all steps: what was kept for a recovery goes."""
        ...
