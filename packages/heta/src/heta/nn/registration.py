"""Makes a model's modules in one order on every part, and keeps and names those that a part needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any
from urllib.parse import quote

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from shared.errors import ConfigError

__all__ = ["Registered", "check_functions", "give_shapes", "make_head", "register_modules"]

Key = tuple[int, Any]


@dataclass(frozen=True, slots=True, eq=False)
class Registered:
    """The modules of one part.

    Attributes:
        modules: by layer and name of the relation; a module that serves several has the first's name.
        module_of: each needed module by (layer, relation) or (layer, type).
    """

    modules: nn.ModuleDict
    module_of: dict[Key, nn.Module]


def register_modules(
    makers: Mapping[Key, Callable[[], nn.Module]], needed: set[Key], head: nn.Module
) -> Registered:
    """Makes all modules in the order of `makers`, and keeps the needed ones.

    All are made on every part so that random initial values do not depend on the part, nor the name
    of a module that serves several relations.

    Raises:
        ConfigError: what a maker gives is no module or has parameters without a shape, or two modules
            share a parameter.
    """
    first_of: dict[int, Key] = {}
    owner_of: dict[int, str] = {id(p): "the head" for p in head.parameters()}
    # Everything stays alive until the end, or a new module might get a dropped one's id.
    made: list[nn.Module] = [head]
    tree = nn.ModuleDict()
    module_of: dict[Key, nn.Module] = {}
    for key, make in makers.items():
        module = make()
        _check_module(key, module)
        made.append(module)
        if id(module) not in first_of:
            first_of[id(module)] = key
            for parameter in module.parameters():
                other = owner_of.setdefault(id(parameter), _name(key))
                if other != _name(key):
                    raise ConfigError(
                        f"the modules of {other} and {_name(key)} share a parameter but are not the "
                        f"same module; return one module for both, so that its gradients are summed"
                    )
        if key in needed:
            number, name = first_of[id(module)]
            layer = str(number)
            if layer not in tree:
                tree[layer] = nn.ModuleDict()
            tree[layer][_escape(name)] = module  # pyrefly: ignore
            module_of[key] = module
    return Registered(tree, module_of)


def make_head(head: Any, dim: int) -> nn.Module:
    """Returns the head given, or a linear layer of so many classes.

    Raises:
        ConfigError: it is no module and no number from 1.
    """
    if isinstance(head, nn.Module):
        return head
    if isinstance(head, bool) or not hasattr(head, "__index__") or head < 1:
        raise ConfigError(f"head: expected a module or a number of classes from 1, got {head!r}")
    return nn.Linear(dim, int(head))


def check_functions(head: nn.Module, activation: Any, stack_function: Any) -> None:
    """Refuses functions whose parameters would not be trained, or not as one process does.

    Raises:
        ConfigError: a function calls a module that the model does not hold, or shares a parameter with
            the head, which is called once and not on each part.
    """
    for name, function in (("activation", activation), ("function of Stack", stack_function)):
        enclosed = _list_enclosed(function)
        for module in enclosed:
            if isinstance(module, nn.Module) and any(p.requires_grad for p in module.parameters()):
                raise ConfigError(
                    f"{name}: expected a module where parameters are trained, got a function that calls "
                    f"{type(module).__name__}, which the model would not hold; pass the module itself"
                )
        if isinstance(function, nn.Module):
            shared = {id(parameter) for parameter in function.parameters()}
            if any(id(parameter) in shared for parameter in head.parameters()):
                raise ConfigError(
                    f"head: expected parameters of its own, it shares one with the {name}; make two "
                    f"modules"
                )


def _list_enclosed(function: Any) -> list[Any]:
    """What a function holds: its object, its closure, and what `functools.partial` was given."""
    enclosed = [getattr(function, "__self__", None)]
    for cell in getattr(function, "__closure__", None) or ():
        with suppress(ValueError):  # a name that is not bound yet
            enclosed.append(cell.cell_contents)
    if isinstance(function, partial):
        enclosed += [function.func, *function.args, *function.keywords.values()]
    return enclosed


def give_shapes(module: nn.Module, src_dim: int, dst_dim: int) -> nn.Module:
    """Calls a module with parameters that have no shape yet on a row, and returns it.

    PyG's linear layers have none where a width is -1, or 0 for destinations that are not read.
    """
    if isinstance(module, nn.Module) and _list_shapeless(module):
        x = torch.zeros(1, src_dim), torch.zeros(1, dst_dim)
        with torch.no_grad():
            module(x, torch.empty(2, 0, dtype=torch.int64))
            # PyG leaves the bias behind no columns as the memory was.
            for each in module.modules():
                if not _list_shapeless(each):
                    weight, bias = (getattr(each, name, None) for name in ("weight", "bias"))
                    if (
                        isinstance(weight, Tensor)
                        and isinstance(bias, Tensor)
                        and not weight.numel()
                    ):
                        bias.zero_()
    return module


def _list_shapeless(module: nn.Module) -> list[str]:
    return [n for n, p in module.named_parameters() if isinstance(p, UninitializedParameter)]


def _check_module(key: Key, module: Any) -> None:
    if not isinstance(module, nn.Module):
        raise ConfigError(f"expected a torch.nn.Module for {_name(key)}, got {module!r}")
    for name in _list_shapeless(module):
        raise ConfigError(
            f"the module of {_name(key)}: its parameter {name} has no shape yet; make it with the "
            f"widths that are passed, instead of -1 or a lazy module"
        )


def _name(key: Key) -> str:
    number, what = key
    return f"layer {number}, {what if isinstance(what, str) else ' '.join(what)}"


def _escape(what: Any) -> str:
    """A name for `nn.ModuleDict`, which takes no dots; different names stay different."""
    texts = ("self", what) if isinstance(what, str) else what
    return "|".join(quote(text, safe=" ").replace(".", "%2E") for text in texts)
