"""Frozen functions: what a training step needs of a batch without training it.

Their row i depends on row i alone, so any rank can encode any samples, and a step's idle periods
can hold them. They depend on data and draws, never on weights that train, so they can run a step
ahead.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from diffusionpipe.job.batches import Batch, flatten
from diffusionpipe.job.draws import Draw
from diffusionpipe.job.layers import ESTIMATE
from shared.errors import ConfigError

__all__ = ["Frozen", "encode", "group_components", "takes_draw"]

# Of a batch; or of a batch, the outputs of functions declared earlier, and a `Draw`.
Frozen = Mapping[str, Callable[..., Any]]


def group_components(frozen: Frozen) -> dict[str, tuple[str, ...]]:
    """Groups frozen functions that one rank runs together for a sample.

    A function of a batch alone is a component of its own. One of (batch, frozen, draw) joins the
    functions declared before it, whose outputs then need not travel to it.

    Returns:
        Names of functions by name of the component, in order.

    Raises:
        ConfigError: a name has a dot or a plus or is "estimate", or a function takes another number of arguments.
    """
    groups: list[tuple[str, ...]] = []
    for name, function in frozen.items():
        if not name or set(name) & set(".+"):
            raise ConfigError(
                f"frozen: expected names without '.' and '+', got {name!r}; do rename it"
            )
        if name == ESTIMATE:
            raise ConfigError(
                f"frozen: expected names other than {ESTIMATE!r}, by which inputs get an earlier pass's "
                "output; do rename it"
            )
        if takes_draw(name, function):
            groups = [(*(earlier for group in groups for earlier in group), name)]
        else:
            groups.append((name,))
    return {"+".join(group): group for group in groups}


def encode(
    frozen: Frozen,
    rows: Batch,
    draw: Draw,
    watch: Callable[[str], AbstractContextManager[Any]] = nullcontext,
) -> dict[str, Tensor]:
    """Runs the functions of a component without gradients.

    Args:
        frozen: its functions.
        rows: of a batch.
        draw: for these rows.
        watch: gives a context for a function's name, in which it runs.

    Returns:
        Outputs by name, nested ones as "name.0" or "name.key".
    """
    outputs: dict[str, Any] = {}
    with torch.no_grad():
        for name, function in frozen.items():
            arguments = (rows, dict(outputs), draw) if takes_draw(name, function) else (rows,)
            with watch(name):
                outputs[name] = function(*arguments)
    return {k: t for name, value in outputs.items() for k, t in flatten(name, value).items()}


def takes_draw(name: str, function: Callable[..., Any]) -> bool:
    """Whether a function is one of (batch, frozen, draw).

    Raises:
        ConfigError: it takes neither one nor three arguments.
    """
    target = function.forward if isinstance(function, nn.Module) else function
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    required = [
        parameter.name
        for parameter in inspect.signature(target).parameters.values()
        if parameter.kind in positional and parameter.default is inspect.Parameter.empty
    ]
    if len(required) not in (1, 3):
        raise ConfigError(
            f"frozen[{name!r}]: expected a function of (batch) or of (batch, frozen, draw), got "
            f"({', '.join(required)}); do give other arguments by a closure"
        )
    return len(required) == 3
