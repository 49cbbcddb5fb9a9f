"""A model's layers: which they are, what attention they name, and which memory is their parameters'."""

from __future__ import annotations

from collections.abc import Container, Iterable
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo import OptimizedModule
from torch.utils._pytree import tree_leaves
from transformers.cache_utils import Cache

from memo.config import shown
from memo.runtime.recording.calls import address
from shared.errors import ConfigError

__all__ = [
    "attention_names",
    "check_prefix",
    "check_untouched",
    "device_of",
    "find_layers",
    "kind_of",
    "named_memory",
    "without_cache",
]

_CACHES = ("cache", "past_key_values", "past_key_value", "layer_past")


def device_of(model: nn.Module) -> torch.device:
    """The device of a model's parameters; RAM where it has none.

    Raises:
        ConfigError: it is no model, or lies elsewhere than in RAM or on a CUDA GPU.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"model: expected a torch.nn.Module, got {shown(model)}; build the model, and give it first"
        )
    device = next((one.device for one in model.parameters()), torch.device("cpu"))
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(
            f"model: expected parameters in RAM or on a CUDA GPU, got device {device}; load them there first"
        )
    return device


def find_layers(model: nn.Module, layers: Iterable[nn.Module] | None = None) -> list[nn.Module]:
    """A model's layers in the order of its forward.

    Args:
        model: a Hugging Face model, bare or wrapped.
        layers: its submodules that are to be taken; by default those of the longest list of modules of one
            class that lies in no other list, which is the decoder's.

    Raises:
        ConfigError: there is no such list, or a given layer is not the model's.
    """
    own = set(model.modules())
    if layers is not None:
        if isinstance(layers, str) or not isinstance(layers, Iterable):
            raise ConfigError(
                f"layers: expected a list of submodules, got {shown(layers)}; give what model.get_submodule returns, "
                "in a list"
            )
        found: list[nn.Module] = list(dict.fromkeys(layers))
        if not found or any(layer not in own for layer in found):
            raise ConfigError(
                f"layers: expected submodules of the model, got {len(found)} of which "
                f"{sum(layer not in own for layer in found)} are not; name them by model.get_submodule"
            )
        return found
    lists = [
        one
        for one in model.modules()
        if isinstance(one, nn.ModuleList) and any(True for _ in one.parameters())
    ]
    inner = {module for one in lists for layer in one for module in layer.modules()}
    outermost = [one for one in lists if one not in inner]  # experts are lists inside of layers
    alike = [one for one in outermost if len({type(layer).__name__ for layer in one}) == 1]
    if not alike:
        kinds = sorted({type(layer).__name__ for one in outermost for layer in one})
        raise ConfigError(
            f"{type(model).__name__}: expected a list of layers of one class, got "
            f"{'one of ' + ', '.join(kinds) if kinds else 'none'}; name the layers by "
            "memo.apply(..., layers=[...])"
        )
    longest = max(alike, key=lambda one: (len(one), sum(p.numel() for p in one.parameters())))
    return list(dict.fromkeys(longest))


def kind_of(layer: nn.Module) -> str:
    """What a layer is, as far as its memory depends on it: its class, and its parameters' names, shapes and dtypes.

    Wrapping by FSDP2 leaves it as it is; adapters do not.
    """
    # FSDP2 gives a layer a class of its own, which derives from the layer's.
    name = next(one.__name__ for one in type(layer).__mro__ if not one.__name__.startswith("FSDP"))
    shapes = sorted(
        (name, tuple(one.shape), str(one.dtype)) for name, one in layer.named_parameters()
    )
    count = sum(one.numel() for one in layer.parameters())
    return f"{name} with {count:,} parameters ({sha256(repr(shapes).encode()).hexdigest()[:12]})"


def check_untouched(
    model: nn.Module, layers: Iterable[nn.Module], applied: Container[nn.Module]
) -> None:
    """Refuses a model whose layers do not run as their classes say.

    Args:
        model, layers: the model and its layers.
        applied: layers that a plan is applied to.

    Raises:
        ConfigError: a plan is applied, a forward was replaced, it is compiled, or the model recomputes activations itself.
    """
    for layer in layers:
        if layer in applied or "forward" in vars(layer):
            raise ConfigError(
                f"{type(layer).__name__}: expected a layer whose forward is its class's own, got one that "
                "was replaced; close the run that was applied before, or remove what replaced it"
            )
    for module in model.modules():
        if isinstance(module, OptimizedModule) or module._compiled_call_impl is not None:
            raise ConfigError(
                f"{type(module).__name__}: expected a model that runs eagerly, got one under "
                "torch.compile: a compiled layer saves other tensors than its modules do; apply the plan "
                "to the model without it"
            )
        if getattr(module, "gradient_checkpointing", False):
            raise ConfigError(
                "expected a model that does not recompute activations itself, got one with gradient "
                "checkpointing on; do model.gradient_checkpointing_disable()"
            )


def attention_names(layers: Iterable[nn.Module]) -> list[str]:
    """Names of attention functions that configurations inside the layers have."""
    found = []
    for layer in layers:
        for module in layer.modules():
            config = getattr(module, "config", None)
            name = getattr(config, "_attn_implementation", None)
            if isinstance(name, str) and name not in found:
                found.append(name)
    return found


def named_memory(layer: nn.Module) -> dict[int, tuple[str, Tensor]]:
    """A layer's parameters and buffers with their names by the address of their storage, as they are now.

    Sparse ones have none, and are left out.
    """
    return {
        address(tensor): (name, tensor)
        for tensors in (layer.named_parameters(), layer.named_buffers())
        for name, tensor in tensors
        if tensor.layout == torch.strided
    }


def check_prefix(layer: nn.Module, args: Iterable[Any], kwargs: dict[str, Any]) -> None:
    """Refuses a cache that has keys and values already: layers run without it would not see them.

    Args:
        layer: by whose number the cache is asked.
        args, kwargs: what it is called with.

    Raises:
        ConfigError: the cache has tokens for this layer.
    """
    caches = [one for one in args if isinstance(one, Cache)]
    caches += [kwargs[key] for key in _CACHES if kwargs.get(key) is not None]
    if not caches:
        return
    numbers = (getattr(module, "layer_idx", None) for module in layer.modules())
    number = next((one for one in numbers if isinstance(one, int)), None)
    for cache in caches:
        if isinstance(cache, Cache):
            is_filled = number is not None and int(cache.get_seq_length(number)) > 0
        else:
            is_filled = any(isinstance(one, Tensor) and one.numel() for one in tree_leaves(cache))
        if is_filled:
            raise ConfigError(
                f"{type(layer).__name__}: expected a cache of keys and values that is empty, got one with a prefix, "
                "which a layer that runs again would not see; give the prefix as tokens or as inputs_embeds, or "
                "train without memo"
            )


def without_cache(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments of a layer without the cache of keys and values, which running it again would fill twice."""
    caches = [key for key in _CACHES if kwargs.get(key) is not None]
    if not caches:
        return kwargs
    return {
        **kwargs,
        **dict.fromkeys(caches),
        **({"use_cache": False} if "use_cache" in kwargs else {}),
    }
