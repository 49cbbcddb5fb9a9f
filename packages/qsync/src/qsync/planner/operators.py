"""The operators of a model that a plan may lower, with what tells one model from another."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shared.errors import ConfigError

if TYPE_CHECKING:
    from torch import nn

__all__ = ["describe_operators", "find_operators"]


def find_operators(model: nn.Module) -> dict[str, nn.Module]:
    """Finds the modules whose products may be computed in a lower precision.

    These are linear layers, convolutions and embeddings themselves. Subclasses are left alone, since
    their forward pass may be another: so is the output layer of `nn.MultiheadAttention`, whose
    weight is read without calling the module.

    Returns:
        Modules by name, in the model's order; one that has several names by its first.
    """
    from torch import nn

    kinds = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Embedding)
    return {name: module for name, module in model.named_modules() if type(module) in kinds}


def describe_operators(model: nn.Module) -> dict[str, str]:
    """Describes the kind and the weight's shape of each operator, as in "Linear 384x1536".

    Raises:
        ConfigError: the model has no such operators.
    """
    operators = {
        name: f"{type(module).__name__} {'x'.join(map(str, module.weight.shape))}"
        for name, module in find_operators(model).items()
    }
    if not operators:
        raise ConfigError(
            f"model: expected linear layers, convolutions or embeddings, got a "
            f"{type(model).__name__} without any; there is nothing to lower"
        )
    return operators
