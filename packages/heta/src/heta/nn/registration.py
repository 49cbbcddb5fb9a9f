"""Makes a model's modules in one order on every part, and keeps and names those that a part needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from torch import nn
from torch.nn.parameter import UninitializedParameter

from shared.errors import ConfigError

__all__ = ["Registered", "register_modules"]

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


def _check_module(key: Key, module: Any) -> None:
    if not isinstance(module, nn.Module):
        raise ConfigError(f"expected a torch.nn.Module for {_name(key)}, got {module!r}")
    for name, parameter in module.named_parameters():
        if isinstance(parameter, UninitializedParameter):
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
