"""A list of modules in a row, or of layers of your own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from diffusionpipe.job.layers import OUTPUT, ChainLayer, State
from shared.errors import ConfigError

__all__ = ["cut_list"]

# A value that more layers read than its successor and its mirror is no skip.
_MAX_SKIP_READERS = 2


def cut_list(
    entries: Sequence[Any] | nn.ModuleList,
) -> tuple[nn.Module, list[ChainLayer], set[str]]:
    """Makes a chain's layers of a list.

    Args:
        entries: layers, or modules that each take the result of the one before. The first module
            reads "sample".

    Raises:
        ConfigError: the list is empty or mixed.
    """
    own_layers = [entry for entry in entries if isinstance(entry, ChainLayer)]
    if own_layers and len(own_layers) == len(entries):
        return _join_layers(own_layers)
    if not entries or not all(isinstance(entry, nn.Module) for entry in entries):
        kinds = ", ".join(sorted({type(entry).__name__ for entry in entries})) or "no entries"
        raise ConfigError(
            f"expected a list of ChainLayer or of modules, got {kinds}; do give each entry the same form"
        )
    layers = []
    hidden = "sample"
    for index, module in enumerate(entries):
        written = OUTPUT if index == len(entries) - 1 else f"h{index}"
        layers.append(_wrap_module(module, str(index), hidden, written))
        hidden = written
    return nn.ModuleList(entries), layers, set()


def _wrap_module(module: nn.Module, name: str, hidden: str, written: str) -> ChainLayer:
    def call(state: State) -> dict[str, Tensor]:
        return {written: module(state[hidden])}

    return ChainLayer(name, call, (hidden,), (written,), (module,))


def _join_layers(layers: list[ChainLayer]) -> tuple[nn.Module, list[ChainLayer], set[str]]:
    modules = dict.fromkeys(module for layer in layers for module in layer.modules)
    readers = Counter(key for layer in layers for key in layer.reads)
    written = {key for layer in layers for key in layer.writes}
    shared = {key for key in written if readers[key] > _MAX_SKIP_READERS}
    return nn.ModuleList(modules), layers, shared
