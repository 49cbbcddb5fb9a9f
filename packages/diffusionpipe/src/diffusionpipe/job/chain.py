"""A backbone as a chain of layers over a dictionary of values.

Layers call the model's own modules in the order of its forward, so that weights, adapters and
checkpoints stay the model's. `Chain.check` compares both to the bit: a release of diffusers that
changes a forward is refused instead of trained wrongly.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from diffusionpipe.job.adapters.registry import ADAPTERS
from diffusionpipe.job.batches import flatten
from diffusionpipe.job.checks.equality import compare_forwards
from diffusionpipe.job.cuts import Cut, count_cuts
from diffusionpipe.job.layers import OUTPUT, ChainLayer, State
from shared.errors import ConfigError

__all__ = ["Chain", "chain"]

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


@dataclass(frozen=True, eq=False)
class Chain:
    """A model and the layers that compute its forward.

    Attributes:
        model: whose forward the layers compute; saved and loaded as it is.
        layers: in order.
        shared: keys that many layers read, as a time embedding: neither hidden state nor skip.
        inputs: keys that no layer writes, in the order in which they are read: the model's keyword
            arguments, nested ones as "added_cond_kwargs.text_embeds".

    Raises:
        ConfigError: a key is written twice, or no layer writes "output".
    """

    model: nn.Module
    layers: tuple[ChainLayer, ...]
    shared: frozenset[str] = frozenset()
    inputs: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        written: dict[str, str] = {}
        inputs: dict[str, str] = {}
        for layer in self.layers:
            for key in layer.reads:
                if key not in written:
                    inputs.setdefault(key, layer.name)
            for key in layer.writes:
                if key in written or key in inputs:
                    raise ConfigError(
                        f"layer {layer.name}: expected a new key to write, got {key!r}, which layer "
                        f"{written.get(key) or inputs[key]} has written or read before; do name "
                        "each value once"
                    )
                written[key] = layer.name
        if OUTPUT not in written:
            raise ConfigError(
                f"expected a layer that writes {OUTPUT!r}, got {', '.join(written) or 'no layer'}; "
                "do name the backbone's result so"
            )
        object.__setattr__(self, "inputs", tuple(inputs))

    def __len__(self) -> int:
        return len(self.layers)

    @property
    def trained(self) -> dict[str, nn.Parameter]:
        """The model's trainable parameters by name."""
        return {n: p for n, p in self.model.named_parameters() if p.requires_grad}

    def list_parameters(self, index: int) -> dict[str, nn.Parameter]:
        """A layer's parameters by their names in the model, in the model's order."""
        own = {
            id(parameter)
            for module in self.layers[index].modules
            for parameter in module.parameters()
        }
        return {n: p for n, p in self.model.named_parameters() if id(p) in own}

    def list_reads(self, first: int, stop: int) -> tuple[str, ...]:
        """Keys that layers `first` to `stop - 1` need from elsewhere: inputs and other layers'."""
        own: set[str] = set()
        keys: dict[str, None] = {}
        for layer in self.layers[first:stop]:
            keys.update(dict.fromkeys(key for key in layer.reads if key not in own))
            own.update(layer.writes)
        return tuple(keys)

    def list_writes(self, first: int, stop: int) -> tuple[str, ...]:
        """Keys that layers `first` to `stop - 1` write for other layers, and the output."""
        rest = {key for layer in self.layers[stop:] for key in layer.reads} | {OUTPUT}
        return tuple(k for layer in self.layers[first:stop] for k in layer.writes if k in rest)

    def run(self, state: State, first: int = 0, stop: int | None = None) -> dict[str, Tensor]:
        """Runs layers `first` to `stop - 1`, or to the last one.

        Args:
            state: holds at least the keys of `list_reads`.
            first: index of the first layer.
            stop: index behind the last layer; all layers from `first` when left out.

        Returns:
            Values by key, as `list_writes` names them.

        Raises:
            ConfigError: a value is missing.
        """
        stop = len(self.layers) if stop is None else stop
        missing = [key for key in self.list_reads(first, stop) if key not in state]
        if missing:
            raise ConfigError(
                f"layers {self.layers[first].name} to {self.layers[stop - 1].name}: expected values "
                f"{', '.join(missing)}, got {', '.join(state) or 'none'}; do hand them over"
            )
        kept = self.list_writes(first, stop)
        last_read = {k: i for i in range(first, stop) for k in self.layers[i].reads}
        values = dict(state)
        for index in range(first, stop):
            values |= self.run_layer(index, {k: values[k] for k in self.layers[index].reads})
            # Frees what nobody reads any more.
            for key in [k for k in values if k not in kept and last_read.get(k, -1) <= index]:
                del values[key]
        return {key: values[key] for key in kept}

    def run_layer(self, index: int, state: State) -> dict[str, Tensor]:
        """Runs one layer; without keeping what backward needs if the model is to recompute it.

        Args:
            index: of the layer.
            state: holds what the layer reads, and nothing else.

        Raises:
            ConfigError: it writes other keys than it announces.
        """
        layer = self.layers[index]
        # Models of diffusers say so when `enable_gradient_checkpointing` was called.
        if getattr(self.model, "is_gradient_checkpointing", False) and torch.is_grad_enabled():
            written = checkpoint(layer.call, state, use_reentrant=False)
        else:
            written = layer.call(state)
        if set(written) != set(layer.writes):
            raise ConfigError(
                f"layer {layer.name}: expected it to write {', '.join(layer.writes)}, got "
                f"{', '.join(written)}; do return what it announces"
            )
        return written

    def flatten(self, keywords: Mapping[str, Any]) -> dict[str, Tensor]:
        """Names the tensors of a forward's keyword arguments as the layers read them.

        Raises:
            ConfigError: one is missing, or no layer reads it.
        """
        state = {k: t for name, value in keywords.items() for k, t in flatten(name, value).items()}
        missing = [key for key in self.inputs if key not in state]
        unread = [key for key in state if key not in self.inputs]
        if missing or unread:
            raise ConfigError(
                f"expected the arguments {', '.join(self.inputs)} of {type(self.model).__name__}, "
                f"got {', '.join(state) or 'none'}; do "
                + (f"add {', '.join(missing)}" if missing else f"leave out {', '.join(unread)}")
            )
        return state

    def validate(self) -> None:
        """Checks what needs no data.

        Raises:
            ConfigError: a BatchNorm trains, or a trainable parameter is in two layers or in none.
        """
        for name, module in self.model.named_modules():
            # Its statistics would depend on the micro-batch, and so would the weights.
            if isinstance(module, _BATCH_NORMS) and module.training:
                raise ConfigError(
                    f"{name}: expected no BatchNorm in training mode, got {type(module).__name__}; "
                    "do call its eval(), or replace it by a GroupNorm"
                )
        owners: dict[str, str] = {}
        for index, layer in enumerate(self.layers):
            for name, parameter in self.list_parameters(index).items():
                if parameter.requires_grad and name in owners:
                    raise ConfigError(
                        f"{name}: expected each trainable parameter in one layer, got layers "
                        f"{owners[name]} and {layer.name}; do join both to one layer"
                    )
                owners[name] = layer.name
        orphans = [name for name in self.trained if name not in owners]
        if orphans:
            raise ConfigError(
                f"expected each trainable parameter in a layer, got {', '.join(orphans[:5])} in "
                "none; do cut the model after its adapters are added, or set requires_grad_(False)"
            )

    def check(self, **example: Any) -> None:
        """Checks that the layers compute the model's own forward to the bit.

        Args:
            **example: arguments of the forward, on the model's device.

        Raises:
            ConfigError: a value differs, naming the first layer; the forward draws random numbers;
                or `validate` or `flatten` refuses.
        """
        self.validate()
        state = self.flatten(example)
        compare_forwards(self.model, self.layers, lambda: self.run(state), example)

    def cuts(self, placement: str = "chain", **example: Any) -> list[Cut]:
        """Counts the bytes that would travel behind each layer but the last.

        Args:
            placement: "chain", or "folded": then skips whose ends lie on one device do not count.
            **example: arguments of the forward; on meta tensors nothing is computed.
        """
        return count_cuts(self.layers, self.shared, self.flatten(example), placement)


def chain(model: nn.Module | Iterable[Any]) -> Chain:
    """Cuts a model into layers.

    Args:
        model: a model of diffusers, with adapters of peft or without; or a list of `ChainLayer`, or of
            modules that each take the result of the one before.

    Raises:
        ConfigError: no adapter knows the model; the message lists those there are.
    """
    # What a wrapper of peft holds is the model itself, changed in place.
    wrapper: Any = model
    inner: Any = wrapper.get_base_model() if hasattr(wrapper, "get_base_model") else wrapper
    names = [base.__name__ for base in type(inner).__mro__ if base.__name__ in ADAPTERS]
    cut_model = ADAPTERS.get(names[0] if names else type(inner).__name__)
    owner, layers, shared = cut_model(inner)
    return Chain(owner if inner is wrapper else wrapper, tuple(layers), frozenset(shared))
