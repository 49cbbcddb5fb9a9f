"""A model's layers: which they are, what attention they name, and which memory is their parameters'."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn

from memo.runtime.recording.calls import address
from shared.errors import ConfigError

__all__ = ["attention_names", "find_layers", "named_memory", "without_cache"]

_log = logging.getLogger(__name__)
_CACHES = ("cache", "past_key_values", "past_key_value", "layer_past")


def find_layers(model: nn.Module, layers: Sequence[nn.Module] | None = None) -> list[nn.Module]:
    """A model's layers in the order of its forward.

    Args:
        model: a Hugging Face model, bare or wrapped.
        layers: its submodules that are to be taken; by default those of the longest list of modules of one
            class, which is the decoder's.

    Raises:
        ConfigError: there is no such list, or a given layer is not the model's.
    """
    own = set(model.modules())
    if layers is not None:
        found = list(layers)
        if not found or any(layer not in own for layer in found):
            raise ConfigError(
                f"layers: expected submodules of the model, got {len(found)} of which "
                f"{sum(layer not in own for layer in found)} are not; name them by model.get_submodule"
            )
        return found
    lists = [one for one in own if isinstance(one, nn.ModuleList) and len(one) > 0]
    lists = [one for one in lists if len({_origin(layer) for layer in one}) == 1]
    lists = [one for one in lists if any(True for _ in one[0].parameters())]
    if not lists:
        raise ConfigError(
            f"{type(model).__name__}: expected a list of layers of one class, got none; name the layers by "
            "memo.apply(..., layers=[...])"
        )
    return list(max(lists, key=lambda one: (len(one), sum(p.numel() for p in one.parameters()))))


def _origin(layer: nn.Module) -> str:
    return type(layer).__name__


def attention_names(layers: Iterable[nn.Module]) -> list[str]:
    """Names of attention functions that configurations inside the layers have."""
    found = []
    for layer in layers:
        for module in layer.modules():
            name = getattr(getattr(module, "config", None), "_attn_implementation", None)
            if isinstance(name, str) and name not in found:
                found.append(name)
    return found


def named_memory(layer: nn.Module) -> dict[int, str]:
    """Names of a layer's parameters and buffers by the address of their memory, as they are now."""
    return {
        address(tensor): name
        for tensors in (layer.named_parameters(), layer.named_buffers())
        for name, tensor in tensors
    }


def without_cache(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments of a layer without the cache of keys and values, which running it again would fill twice."""
    caches = [key for key in _CACHES if kwargs.get(key) is not None]
    if not caches:
        return kwargs
    _log.info("memo: training needs no cache of keys and values; layers are run without it")
    return {
        **kwargs,
        **dict.fromkeys(caches),
        **({"use_cache": False} if "use_cache" in kwargs else {}),
    }
