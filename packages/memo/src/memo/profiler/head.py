"""What a step takes outside its layers: embedding, head and loss, with layers that pass their input on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.func import functional_call
from torch.utils._pytree import tree_map

from memo.profiler.clock import now, untouched_gradients
from memo.profiler.storage_meter import StorageMeter
from memo.profiler.untouched import watch_writes
from memo.runtime.layers import without_cache
from memo.runtime.recording.arguments import input_of, tensors_in
from memo.runtime.recording.calls import address
from shared.errors import ConfigError

__all__ = [
    "capture_call",
    "count_block_head",
    "count_given",
    "count_head",
    "loss_of",
    "measure_head",
    "pass_on",
    "refuse_batch",
    "replaced",
    "shortened",
]


class _Captured(Exception):
    """The first layer's arguments are known: the rest of the forward is not needed."""


@contextmanager
def replaced(layers: list[nn.Module], forward: Callable[..., Any]) -> Iterator[None]:
    """Layers with another forward for a while."""
    for layer in layers:
        layer.forward = forward  # type: ignore[method-assign]
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


def capture_call(
    model: nn.Module, layers: list[nn.Module], batch: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What a model calls its first layer with; the layer's input needs a gradient, as that of later ones does.

    Raises:
        ConfigError: the model fails on this batch, or does not call its layers.
    """
    found: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def forward(*args: Any, **kwargs: Any) -> Any:
        found.append((args, kwargs))
        raise _Captured

    with replaced(layers, forward), torch.no_grad(), _refusing(model), watch_writes():
        try:
            model(**batch)
        except _Captured:
            return _needing_gradient(*found[0])
    raise ConfigError(
        f"{type(model).__name__}: expected its forward to call its layers on this batch, got none called; "
        "name the layers, or give the batch that your loop gives"
    )


def count_given(args: tuple[Any, ...], kwargs: dict[str, Any], batch: Mapping[str, Any]) -> int:
    """Bytes of what a layer is called with beside its input and the batch: it lives as long as a step."""
    there = {address(one) for one in (*tensors_in(dict(batch)), input_of(args, kwargs))}
    given = {address(one): one for one in tensors_in((args, without_cache(kwargs)))}
    return sum(one.untyped_storage().nbytes() for at, one in given.items() if at not in there)


@contextmanager
def _refusing(model: nn.Module) -> Iterator[None]:
    """Says that a model does not run on a batch where it fails."""
    try:
        yield
    except (torch.OutOfMemoryError, ConfigError):
        raise
    except (RuntimeError, ValueError, TypeError, LookupError, AttributeError) as error:
        raise refuse_batch(model, error) from error


def refuse_batch(module: nn.Module, error: Exception) -> ConfigError:
    """The error that says that a model, or a layer of it, does not run on a batch."""
    first, *_ = str(error).strip().splitlines() or [type(error).__name__]
    return ConfigError(
        f"batch: expected arguments that {type(module).__name__} runs on, got: {first}; give the batch that your "
        "loop gives"
    )


def _needing_gradient(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    source = input_of(args, kwargs)
    given = source.detach().requires_grad_(True)
    return (
        tuple(given if one is source else one for one in args),
        {key: given if one is source else one for key, one in kwargs.items()},
    )


def shortened(
    batch: Mapping[str, Any], factor: int, *, least_tokens: int = 1
) -> dict[str, Any] | None:
    """A batch whose sequences have their first tokens only, one in `factor`.

    None where its tensors are not [batch, tokens], or too few tokens would be left.
    """
    tensors = [one for one in batch.values() if isinstance(one, Tensor)]
    shapes = {tuple(one.shape) for one in tensors}
    if len(shapes) != 1 or tensors[0].ndim != 2 or tensors[0].shape[1] // factor < least_tokens:
        return None
    length = tensors[0].shape[1] // factor
    return {
        name: one[:, :length].contiguous() if isinstance(one, Tensor) else one
        for name, one in batch.items()
    }


def measure_head(
    model: nn.Module, layers: list[nn.Module], batch: Mapping[str, Any], *, repeats: int = 2
) -> float:
    """Seconds of forward and backward without the layers; gradients are left as they were.

    Raises:
        ConfigError: the model fails on this batch.
    """
    device = next(model.parameters()).device
    seconds = []
    with _without_layers(model, layers):
        with watch_writes():
            loss_of(model(**batch)).backward()
        for _ in range(repeats):
            started = now(device)
            loss_of(model(**batch)).backward()
            seconds.append(now(device) - started)
    return min(seconds)


def count_block_head(model: nn.Module, layers: list[nn.Module], batch: Mapping[str, Any]) -> int:
    """Most bytes of forward and backward without the layers, gradients of parameters left out.

    Counted while it runs: which tokens count is known by their values only.

    Raises:
        ConfigError: the model fails on this batch.
    """
    with _without_layers(model, layers):
        with watch_writes():
            loss_of(model(**batch)).backward()  # gradients are there from now on
        with StorageMeter() as meter:
            loss_of(model(**batch)).backward()
    return meter.peak_bytes


def count_head(model: nn.Module, layers: list[nn.Module], batch: Mapping[str, Any]) -> int:
    """Most bytes of forward and backward without the layers, gradients of parameters left out.

    Counted on fake tensors: nothing is computed, nothing allocated. Where shapes follow from values, as where
    only some tokens' logits count, it is counted as it runs.

    Raises:
        ConfigError: the model fails on this batch.
    """
    with _refusing(model):
        try:
            return _count_fake_head(model, layers, batch)
        except (DataDependentOutputException, DynamicOutputShapeException):
            return count_block_head(model, layers, batch)


def _count_fake_head(model: nn.Module, layers: list[nn.Module], batch: Mapping[str, Any]) -> int:
    mode = FakeTensorMode(allow_non_fake_inputs=True)

    def fake(value: Any) -> Any:
        return mode.from_tensor(value.detach()) if isinstance(value, Tensor) else value

    tensors = {
        f"model.{name}": nn.Parameter(fake(one), one.requires_grad)
        if isinstance(one, nn.Parameter)
        else fake(one)
        for name, one in (*model.named_parameters(), *model.named_buffers())
    }
    with mode, replaced(layers, pass_on):
        for one in tensors.values():
            if one.requires_grad:
                one.grad = torch.zeros_like(one)
        return functional_call(_Counted(model), tensors, (), tree_map(fake, dict(batch)))


@contextmanager
def _without_layers(model: nn.Module, layers: list[nn.Module]) -> Iterator[None]:
    """For a model that is run forward and backward with layers that pass their input on."""
    with (
        untouched_gradients(model),
        replaced(layers, pass_on),
        torch.enable_grad(),
        _refusing(model),
    ):
        yield


class _Counted(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **batch: Any) -> int:
        with StorageMeter() as meter, torch.enable_grad():
            loss_of(self.model(**batch)).backward()
            return meter.peak_bytes


def pass_on(*args: Any, **kwargs: Any) -> Tensor:
    """A layer's forward that returns its input."""
    return input_of(args, kwargs)


def loss_of(out: Any) -> Tensor:
    """What a model's result is run backward from: its loss, or the sum of its logits or first tensor.

    Raises:
        ConfigError: it has none of them.
    """
    loss = getattr(out, "loss", None)
    if loss is None and isinstance(out, Mapping):
        loss = out.get("loss")
    if isinstance(loss, Tensor):
        return loss
    if isinstance(out, Tensor):
        return out.float().sum()
    logits = getattr(out, "logits", None)
    if isinstance(logits, Tensor):
        return logits.float().sum()
    values = out.values() if isinstance(out, Mapping) else out
    for one in values if isinstance(values, Iterable) else ():
        if isinstance(one, Tensor):
            return one.float().sum()
    raise ConfigError(
        f"expected a model that returns a loss, logits or another tensor, got {type(out).__name__}; have its forward "
        "return the loss that your loop runs backward"
    )
