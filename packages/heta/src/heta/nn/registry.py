"""Models by name, for the command line; a function of the user's makes any other."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from heta.data.references import check_reference, load_reference
from shared.errors import ConfigError, DataError
from shared.registry import Registry

if TYPE_CHECKING:
    from heta.graph.part import Part
    from heta.nn.hetero_model import HeteroModel

__all__ = ["MODELS", "build_model", "check_model"]

# Functions (part, hidden, num_classes) -> model, by import path: the help does not import torch.
MODELS: Registry[str, Callable[..., HeteroModel]] = Registry("model")
MODELS.add("rgcn", "heta.nn.rgcn:RGCN", "a mean and a matrix for each relation")
MODELS.add("rgat", "heta.nn.rgat:RGAT", "attention within each relation")
MODELS.add("hgt", "heta.nn.hgt:HGT", "one attention over all relations, with own rows")
MODELS.add("bghgnn", "heta.nn.bghgnn:BGHGNN", "one set of parameters for any number of relations")


def check_model(name: str) -> None:
    """Refuses a name that is neither registered nor a function's; nothing is imported.

    Raises:
        ConfigError: the name is unknown, or its file or module is missing.
    """
    if ":" in name:
        check_reference(name, "model")
    else:
        MODELS.check(name)


def build_model(name: str, part: Part) -> HeteroModel:
    """Makes the model of a name over a part, with the plan's width.

    Args:
        name: a name of `MODELS`, or "file.py:function" or "module:function" of a function
            (part, hidden, num_classes) that returns a `HeteroModel`.
        part: the part.

    Raises:
        ConfigError: the name is unknown, or the function returns something else.
        DataError: the graph has no labels.
    """
    if not part.num_classes:
        raise DataError("expected a graph with labels, it has none; write a part of one that has")
    make = load_reference(name, "model") if ":" in name else MODELS.get(name)
    model = make(part, part.hidden, part.num_classes)
    from heta.nn.hetero_model import HeteroModel

    if not isinstance(model, HeteroModel):
        raise ConfigError(
            f"model: expected {name} to return a heta.nn.HeteroModel, got {type(model).__name__}"
        )
    return model
