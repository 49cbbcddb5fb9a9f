"""What a model calls its layers with, and what they return, found out without running them one after another."""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.func import functional_call
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_leaves, tree_map
from transformers.cache_utils import Cache

from memo.profiler.storage_meter import StorageMeter
from memo.profiler.untouched import watch_writes
from memo.runtime.layers import check_prefix, without_cache
from memo.runtime.recording.arguments import input_of, tensors_in
from memo.runtime.recording.calls import address
from shared.errors import ConfigError

__all__ = [
    "LayerCall",
    "capture_call",
    "capture_calls",
    "count_given",
    "is_index",
    "pass_on",
    "refuse_batch",
    "refusing",
    "replaced",
    "run_on_fakes",
    "shortened",
    "signature_of",
    "structure_of",
    "tensors_by_path",
]

_log = logging.getLogger(__name__)

_PLAIN = (bool, int, float, str, type(None))

_FAILURES = (
    *(RuntimeError, ValueError, TypeError, LookupError, AttributeError),
    *(NotImplementedError, AssertionError),
)
"""What models raise on a batch that is none of theirs."""


@dataclass(frozen=True, slots=True)
class Blank:
    """A tensor of a layer's result, without its values."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class LayerCall:
    """A model's call of one of its layers.

    Attributes:
        args, kwargs: what it is called with, a cache of keys and values left out.
        result: what it returns, with a `Blank` in each tensor's place.
        autocast: settings of autocast around it: device type, type and whether it is on.
        before_bytes: most bytes before the first layer's call, beyond what is there at it but for its input; of other
            layers 0.
        structure, own_structure: of the layer before anything ran, see `structure_of`; the latter with its number.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any
    autocast: tuple[str, torch.dtype, bool]
    structure: Hashable
    own_structure: Hashable
    before_bytes: int = 0

    @property
    def source(self) -> Tensor:
        """The layer's input."""
        return input_of(self.args, self.kwargs)

    @property
    def num_rows(self) -> int:
        """Rows of the input."""
        return self.source.numel() // self.source.shape[-1]

    def needing(self, paths: Container[str]) -> LayerCall:
        """The same call, whose tensors need a gradient where their paths are among those given."""
        tensors = tensors_by_path(self.args, self.kwargs)
        known = {id(one): path in paths for path, one in tensors.items()}
        made: dict[int, Tensor] = {}

        def change(value: Any) -> Any:
            if id(value) not in known:
                return value
            if id(value) not in made:
                made[id(value)] = value.detach().requires_grad_(known[id(value)])
            return made[id(value)]

        return replace(self, args=tree_map(change, self.args), kwargs=tree_map(change, self.kwargs))

    @contextmanager
    def settings(self) -> Iterator[None]:
        """Autocast as it is around the call."""
        device_type, dtype, is_enabled = self.autocast
        with torch.autocast(device_type, dtype=dtype, enabled=is_enabled):
            yield


def tensors_by_path(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Tensor]:
    """Tensors among arguments, by the path that leads to each."""
    leaves, _ = tree_flatten_with_path((args, kwargs))
    return {keystr(path): one for path, one in leaves if isinstance(one, Tensor)}


@contextmanager
def replaced(layers: Sequence[nn.Module], forwards: Sequence[Callable[..., Any]]) -> Iterator[None]:
    """Gives layers other forwards for a while."""
    for layer, forward in zip(layers, forwards, strict=True):
        layer.forward = forward  # type: ignore[method-assign]
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


@contextmanager
def refusing(module: nn.Module) -> Iterator[None]:
    """Says that a model does not run on a batch where it fails."""
    try:
        yield
    except (torch.OutOfMemoryError, ConfigError):
        raise
    except _FAILURES as error:
        raise refuse_batch(module, error) from error


def refuse_batch(module: nn.Module, error: Exception) -> ConfigError:
    """The error that says that a model, or a layer of it, does not run on a batch."""
    first, *_ = str(error).strip().splitlines() or [type(error).__name__]
    return ConfigError(
        f"batch: expected arguments that {type(module).__name__} runs on, got: {first}; give the batch that your "
        "loop gives"
    )


def run_on_fakes(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Runs a module on tensors that have shapes and no memory; arguments may be real.

    Raises:
        Exception: whatever it raises, as where its shapes follow from values.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)

    def fake(value: Any) -> Any:
        if isinstance(value, FakeTensor) or not isinstance(value, Tensor):
            return value
        return mode.from_tensor(value.detach()).requires_grad_(value.requires_grad)

    tensors = {
        name: nn.Parameter(fake(one), one.requires_grad)
        if isinstance(one, nn.Parameter)
        else fake(one)
        for name, one in (*module.named_parameters(), *module.named_buffers())
    }
    args, kwargs = tree_map(fake, (args, kwargs))
    with mode:
        for one in tensors.values():
            if one.requires_grad:
                one.grad = torch.zeros_like(one)
        return functional_call(module, tensors, args, kwargs)


def capture_calls(
    model: nn.Module, layers: Sequence[nn.Module], batch: Mapping[str, Any]
) -> list[LayerCall | None]:
    """What a model calls each of its layers with; None for layers that it does not call.

    One forward without gradients, in which a layer's input takes the place of its result.

    Args:
        model: inside of `untouched`.
        layers: its layers.
        batch: its arguments.

    Raises:
        ConfigError: the model fails on this batch, calls none of its layers, or one of them more than once.
    """
    calls: list[LayerCall | None] = [None] * len(layers)
    results: dict[object, Any] = {}
    structures = [(structure_of(one), structure_of(one, has_number=True)) for one in layers]

    def forward_of(number: int) -> Callable[..., Any]:
        layer = layers[number]
        own = layer.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            if calls[number] is not None:
                raise ConfigError(
                    f"layer {number} ({type(layer).__name__}): expected a layer that a forward calls once, got one that "
                    "it calls again, as with shared weights, for which no memory can be promised; take "
                    "memo.Plan.fixed, or name other layers"
                )
            check_prefix(layer, args, kwargs)
            args = tuple(None if isinstance(one, Cache) else one for one in args)
            kwargs = without_cache(kwargs)
            before_bytes = (
                meter.peak_bytes - meter.live_bytes + meter.bytes_of(input_of(args, kwargs))
            )
            key = structures[number][0], signature_of(args, kwargs)
            if key not in results:
                layer.forward = own
                try:
                    results[key] = _result_of(number, layer, args, kwargs)
                finally:
                    layer.forward = forward
            device_type = input_of(args, kwargs).device.type
            calls[number] = call = LayerCall(
                args,
                kwargs,
                results[key],
                (
                    device_type,
                    torch.get_autocast_dtype(device_type),
                    torch.is_autocast_enabled(device_type),
                ),
                *structures[number],
                before_bytes=0 if any(calls) else before_bytes,
            )
            return pass_on(call.result, call.source)

        return forward

    forwards = [forward_of(number) for number in range(len(layers))]
    meter = StorageMeter()
    with replaced(layers, forwards), torch.no_grad(), refusing(model), watch_writes(), meter:
        model(**batch)
    if not any(calls):
        raise ConfigError(
            f"{type(model).__name__}: expected its forward to call its layers on this batch, got none called; "
            "name the layers, or give the batch that your loop gives"
        )
    return calls


def _result_of(number: int, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a layer returns, with a `Blank` in each tensor's place.

    Raises:
        ConfigError: it fails.
    """
    try:
        out = run_on_fakes(layer, *args, **kwargs)
    except Exception as error:  # noqa: BLE001 - what a layer raises on real tensors is its own error
        _log.info("%s: run, as it fails on fake tensors: %s", type(layer).__name__, error)
        with refusing(layer):
            out = layer(*args, **kwargs)
    if not any(isinstance(one, Tensor) and one.is_floating_point() for one in tree_leaves(out)):
        raise ConfigError(
            f"layer {number} ({type(layer).__name__}): expected a layer that returns a floating-point tensor, got "
            f"{type(out).__name__} without one; name other layers by memo.autotune(..., layers=[...])"
        )
    return tree_map(
        lambda one: Blank(tuple(one.shape), one.dtype) if isinstance(one, Tensor) else one, out
    )


def pass_on(result: Any, source: Tensor, anchor: Tensor | None = None) -> Any:
    """A layer's result made of its input: the input itself, other tensors zeros.

    Args:
        result: its form.
        source: the layer's input.
        anchor: a zero that the result depends on; the result is then a tensor of its own.
    """

    def fill(one: Any) -> Any:
        if not isinstance(one, Blank):
            return one
        if (tuple(source.shape), source.dtype) == (one.shape, one.dtype):
            return source if anchor is None else source + anchor.to(source.dtype)
        if not one.dtype.is_floating_point:
            return torch.zeros(one.shape, dtype=one.dtype, device=source.device)
        value = source.reshape(-1)[:1].sum() * 0
        if anchor is not None:
            value = value + anchor
        return value.to(one.dtype).expand(one.shape).clone()

    return tree_map(fill, result, is_leaf=lambda one: isinstance(one, Blank))


class _Captured(Exception):
    """The first layer's arguments are known: the rest of the forward is not needed."""


def capture_call(
    model: nn.Module, layers: Sequence[nn.Module], batch: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What a model calls its first layer with; the layer's input needs a gradient, as that of later ones does.

    Raises:
        ConfigError: the model fails on this batch, or does not call its layers.
    """
    first: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def forward(*args: Any, **kwargs: Any) -> Any:
        first.append((args, kwargs))
        raise _Captured

    forwards = [forward] * len(layers)
    with replaced(layers, forwards), torch.no_grad(), refusing(model):
        try:
            model(**batch)
        except _Captured:
            args, kwargs = first[0]
            source = input_of(args, kwargs)
            needing = source.detach().requires_grad_(True)
            return (
                tuple(needing if one is source else one for one in args),
                {key: needing if one is source else one for key, one in kwargs.items()},
            )
    raise ConfigError(
        f"{type(model).__name__}: expected its forward to call its layers on this batch, got none called; "
        "name the layers, or give the batch that your loop gives"
    )


def count_given(
    calls: Iterable[tuple[tuple[Any, ...], dict[str, Any]]], batch: Mapping[str, Any]
) -> int:
    """Bytes of what layers are called with beside their inputs and the batch: it lives as long as a step."""
    there = {address(one) for one in tensors_in(dict(batch))}
    given: dict[int, Tensor] = {}
    for args, kwargs in calls:
        there.add(address(input_of(args, kwargs)))
        given |= {address(one): one for one in tensors_in((args, without_cache(kwargs)))}
    return sum(one.untyped_storage().nbytes() for key, one in given.items() if key not in there)


def shortened(
    batch: Mapping[str, Any], factor: int, *, least_tokens: int = 1
) -> dict[str, Any] | None:
    """A batch whose sequences have their first tokens only, one in `factor`.

    None where its tensors are neither [batch, tokens] nor single numbers, or too few tokens would be left.
    """
    tensors = [one for one in batch.values() if isinstance(one, Tensor) and one.ndim > 0]
    shapes = {tuple(one.shape) for one in tensors}
    if len(shapes) != 1 or tensors[0].ndim != 2 or tensors[0].shape[1] // factor < least_tokens:
        return None
    length = tensors[0].shape[1] // factor
    return {
        name: one[:, :length].contiguous() if isinstance(one, Tensor) and one.ndim else one
        for name, one in batch.items()
    }


def structure_of(layer: nn.Module, *, has_number: bool = False) -> Hashable:
    """What a layer is: classes, parameters, buffers and plain attributes of its modules.

    Args:
        layer: the layer.
        has_number: whether attributes that number the layer count, by which some choose what they do.
    """
    return tuple(
        (
            name,
            type(module),
            tuple(
                (key, value)
                for key, value in vars(module).items()
                if type(value) in _PLAIN and (has_number or not is_index(key))
            ),
            tuple(
                (key, tuple(one.shape), one.dtype, one.requires_grad)
                for tensors in (module._parameters, module._buffers)
                for key, one in tensors.items()
                if one is not None
            ),
        )
        for name, module in layer.named_modules()
    )


def is_index(name: str) -> bool:
    """Whether an attribute's name says that it is the layer's number, as transformers' `layer_idx` is."""
    return any(part in ("idx", "index", "id", "number") for part in name.lower().split("_"))


def signature_of(*values: Any) -> Hashable:
    """Forms of all that a layer is called with: types, and of tensors shapes, types and whether they need a gradient."""
    if len(values) != 1:
        return tuple(map(signature_of, values))
    (value,) = values
    if isinstance(value, Tensor):
        return tuple(value.shape), value.dtype, value.requires_grad
    if isinstance(value, tuple | list):
        return type(value), *map(signature_of, value)
    if isinstance(value, dict):
        return tuple((key, signature_of(one)) for key, one in value.items())
    return value if type(value) in _PLAIN else type(value)
