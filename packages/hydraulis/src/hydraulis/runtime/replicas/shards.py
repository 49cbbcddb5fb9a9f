"""Which parameters tensor-parallel ranks cut, and along which dimension, as a model's own plan says."""

from __future__ import annotations

import re
from typing import Any

from torch import nn

from hydraulis.planner.replicas import ParameterPlacement
from shared.errors import ConfigError

__all__ = ["ends", "read_placements", "style_of"]

_ROWS, _COLUMNS, _PARTS = "colwise", "rowwise", "replicated_with_grad_allreduce"


def style_of(model: Any, module: str) -> str | None:
    """A module's style in the model's `base_model_tp_plan`; None where ranks hold it alike.

    Args:
        model: a Hugging Face causal LM.
        module: the module's name.

    Raises:
        ConfigError: the plan has a style that is not known here.
    """
    base, _, inner = module.partition(".")
    if base != model.base_model_prefix:
        return None
    pattern = re.sub(r"\.\d+(?=\.|$)", ".*", inner)
    found = (model.config.base_model_tp_plan or {}).get(pattern)
    if found not in (None, _ROWS, _COLUMNS, _PARTS):
        raise ConfigError(
            f"{module}: expected {_ROWS}, {_COLUMNS} or {_PARTS} in the model's tensor-parallel plan, "
            f"got {found!r}; train it without tensor parallelism, under FSDP2"
        )
    return found


def ends(model: Any) -> tuple[list[str], str, list[str]]:
    """Modules of the base model before its layers, the name of the layers, and modules behind them.

    Raises:
        ConfigError: the model's `base_model_pp_plan` is missing, or names no layers.
    """
    names = list(model.config.base_model_pp_plan or {})
    layers = [
        name for name in names if isinstance(getattr(model.base_model, name, None), nn.ModuleList)
    ]
    if len(layers) != 1:
        raise ConfigError(
            f"expected one list of layers in the model's base_model_pp_plan, got {names}; train it "
            f"without replicas"
        )
    at = names.index(layers[0])
    return names[:at], layers[0], names[at + 1 :]


def read_placements(model: Any) -> tuple[ParameterPlacement, ...]:
    """How the ranks of a replica share each parameter; tied ones once, by their first name.

    Embedding and head are cut by rows, so that ranks share the vocabulary whether they are tied or not.

    Args:
        model: a Hugging Face causal LM.

    Raises:
        ConfigError: as `style_of` and `ends`.
    """
    before, layers, _ = ends(model)
    prefix, num_layers = model.base_model_prefix, len(getattr(model.base_model, layers))
    by_rows = {id(model.get_input_embeddings()), id(model.get_output_embeddings())}
    modules = dict(model.named_modules())
    found: dict[int, ParameterPlacement] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        module, _, leaf = name.rpartition(".")
        own = re.match(rf"{re.escape(prefix)}\.{re.escape(layers)}\.(\d+)\.", name)
        is_before = any(name.startswith(f"{prefix}.{one}.") for one in before)
        layer = int(own[1]) if own else -1 if is_before else num_layers
        if id(parameter) in found:
            first = found[id(parameter)]
            at: dict[str, Any] = {**vars(first), "layers": tuple(sorted({*first.layers, layer}))}
            found[id(parameter)] = ParameterPlacement(**at)
            continue
        style = _ROWS if id(modules[module]) in by_rows else style_of(model, module)
        sharing, dim = "whole", 0
        if style == _ROWS or (style == _COLUMNS and leaf == "weight"):
            sharing, dim = "cut", int(style == _COLUMNS)
        elif style == _COLUMNS:
            # A bias is added once to the sum of all ranks' products.
            sharing = "first"
        elif style == _PARTS:
            sharing = "parts"
        found[id(parameter)] = ParameterPlacement(
            name=name, shape=tuple(parameter.shape), itemsize=parameter.element_size(),
            layers=(layer,), sharing=sharing, dim=dim, is_trained=parameter.requires_grad,
        )  # fmt: skip
    return tuple(found.values())
