"""An optimizer whose last step can be taken back, parameter by parameter."""

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

__all__ = ["Mode", "Undoable", "undoable"]

Mode = Literal["exact", "arith", "commit"]


def undoable(optimizer: torch.optim.Optimizer, mode: Mode = "exact") -> "Undoable":
    """Wrap a torch optimizer so that its last step can be undone.

    Args:
        optimizer: Any torch optimizer that steps each parameter by itself.
        mode: "exact" restores every bit: SGD, Adam, AdamW, RMSprop and Adagrad by the step's
            inverse and its error in units in the last place, one byte a value; every other
            optimizer by copies of what it changes, which one log line says. "arith" is the
            published arithmetic: no memory, right up to rounding. "commit" keeps nothing and cannot
            undo: the ranks vote before they update.

    Raises:
        ConfigError: The mode is unknown; the optimizer needs a closure or has hooks on its step; or
            the mode is "arith" and a group's step has no inverse (the message names the group).
    """
    raise NotImplementedError


class Undoable:
    """Steps parameters and takes their last step back; made by `undoable`.

    Steps of different parameters may run in different threads.

    Attributes:
        optimizer: The torch optimizer. Its state stays under torch's keys, so that torch can resume
            from it.
        mode: "exact", "arith" or "commit".
        marks: Steps applied, by parameter in the optimizer's order. A parameter without gradient
            passes a step unchanged, and its mark counts it.
    """

    optimizer: torch.optim.Optimizer
    mode: Mode
    marks: list[int]

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        """All parameters, in the optimizer's order."""
        raise NotImplementedError

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The optimizer's groups, as schedulers, clipping and GradScaler read them."""
        raise NotImplementedError

    @property
    def undo_bytes(self) -> int:
        """Bytes held for undoing, gradients aside: they live until the next step anyway."""
        raise NotImplementedError

    def zero_grad(self) -> None:
        """Set every gradient to None; those that undoing needs are kept until `confirm`."""
        raise NotImplementedError

    def step(self) -> None:
        """Step all parameters from their gradients and advance all marks."""
        raise NotImplementedError

    def update(self, indices: Sequence[int]) -> None:
        """Step exactly these parameters, with the hyperparameters of now; advance their marks.

        Args:
            indices: Places in `parameters`.

        Raises:
            ConfigError: Parameters were added to the optimizer since it was wrapped.
            DataError: In "arith", a gradient is sparse or a parameter has a type whose step loses
                information; nothing is stepped then.
        """
        raise NotImplementedError

    def undo(self, grads: Sequence[Tensor | None] | None = None) -> None:
        """Take back the last step of all parameters.

        Args:
            grads: In "arith" only: the gradients of the step to undo, one a parameter in the
                optimizer's order, to go a further step back than the last.

        Raises:
            ConfigError: The mode cannot undo, or takes no gradients.
            DataError: As for `undo_only`.
        """
        raise NotImplementedError

    def undo_only(self, indices: Sequence[int]) -> None:
        """Take back the last step of exactly these parameters; in "exact" every bit is restored.

        A parameter whose first step is undone has no state afterwards, as before it.

        Raises:
            ConfigError: The mode is "commit".
            DataError: A parameter has no step to undo (confirmed, undone already, never stepped),
                or its gradient or state was changed in place since; nothing is undone then. In
                "arith", a value came out infinite or NaN: fetch the parameter.
        """
        raise NotImplementedError

    def confirm(self) -> None:
        """All ranks have the step: let go what undoing it needs; buffers stay for the next."""
        raise NotImplementedError

    def state_of(self, index: int) -> dict[str, Tensor]:
        """What a peer needs to continue parameter `index`: "param", then torch's state tensors.

        The tensors are the live ones, without autograd; of a DTensor its local part.

        Raises:
            ConfigError: The optimizer keeps state that is no tensor.
        """
        raise NotImplementedError

    def prepare(self, index: int) -> dict[str, Tensor]:
        """Make torch's state of a parameter that never stepped, to be filled by a transfer.

        Returns:
            `state_of(index)`, with arbitrary values in the state made here.
        """
        raise NotImplementedError

    def mark(self, index: int, steps: int) -> None:
        """Say that parameter `index` has had `steps` steps; its last one cannot be undone.

        With 0, the state of the parameter is removed.
        """
        raise NotImplementedError
