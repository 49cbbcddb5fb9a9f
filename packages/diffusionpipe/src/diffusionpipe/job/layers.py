"""A layer: the smallest piece of a backbone that a stage can begin or end at."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor, nn

__all__ = ["ESTIMATE", "OUTPUT", "ChainLayer", "State", "keep_modules"]

# Values by key. A key is written once and then stays as it is, so who needs what from whom follows
# from the layers' reads and writes alone.
State = Mapping[str, Tensor]

# Key of a backbone's result.
OUTPUT = "output"
# Name under which `inputs` finds what the backbone predicted in an earlier pass.
ESTIMATE = "estimate"


@dataclass(frozen=True, slots=True)
class ChainLayer:
    """A function from some values of a backbone's state to others.

    Attributes:
        name: what messages call it.
        call: takes a state that holds at least `reads`, returns a dictionary of `writes`. It must
            not write into what it reads: a value may be on its way to another rank.
        reads: keys, first the hidden state.
        writes: keys, first the hidden state.
        modules: modules that hold the layer's parameters.
    """

    name: str
    call: Callable[[State], dict[str, Tensor]]
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    modules: tuple[nn.Module, ...]


def keep_modules(*modules: object) -> tuple[nn.Module, ...]:
    """Those of some modules that there are: a model has None where a configuration omits one."""
    return tuple(module for module in modules if isinstance(module, nn.Module))
