"""What a layer is called with: its input among its arguments, and what of them lives on anyhow."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from memo.runtime.recording.items import Watch, can_watch
from shared.errors import ConfigError

__all__ = ["Arguments", "Outside", "input_of", "tensors_in"]


class Outside:
    """A parameter, a buffer or an argument of all layers that autograd saves: it lives on anyhow."""

    __slots__ = ("_tensor", "_watch")

    def __init__(self, tensor: Tensor) -> None:
        """Notes its version, as autograd would."""
        self._tensor, self._watch = tensor.detach(), Watch(tensor)

    def unpack(self) -> Tensor:
        """The tensor.

        Raises:
            RuntimeError: it was changed in place since.
        """
        self._watch.check(f"a tensor of shape {list(self._tensor.shape)}")
        return self._tensor


class Arguments:
    """Arguments of one call of a layer.

    Attributes:
        given: positional and by name.
        source: the layer's input, see `input_of`; None when it was released.
    """

    source: Tensor | None

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Finds the input.

        Raises:
            ConfigError: there is none.
        """
        self.source = source = input_of(args, kwargs)
        # Its own tuples, lists and dictionaries: callers may change theirs.
        self.given = _replaced((args, kwargs), lambda one: one)
        self._requires_grad = source.requires_grad
        named = {**{str(position): one for position, one in enumerate(args)}, **kwargs}
        self._watches = {
            name: Watch(one)
            for name, one in named.items()
            if isinstance(one, Tensor) and one is not source and can_watch(one)
        }

    @property
    def changed(self) -> list[str]:
        """Names of arguments that were written to since."""
        return [f"argument {name!r}" for name, watch in self._watches.items() if watch.has_changed]

    def others(self) -> Iterator[Tensor]:
        """All tensors but the input."""
        return (
            one for one in tensors_in(self.given) if one is not self.source and one is not _SOURCE
        )

    def release_source(self) -> None:
        """Holds the input no longer."""
        self.given = _replaced(self.given, lambda one: _SOURCE if one is self.source else one)
        self.source = None

    def filled(self, source: Tensor) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with an input in its place, and the others apart from any graph."""
        return _replaced(
            self.given,
            lambda one: (
                source.detach().requires_grad_(self._requires_grad)
                if one is _SOURCE
                else one.detach().requires_grad_(one.requires_grad)
            ),
        )


_SOURCE: Any = Tensor()
"""Stands for a layer's input among its arguments."""


def input_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
    """A layer's input: the first floating-point tensor that it is given by itself.

    Raises:
        ConfigError: there is none.
    """
    for one in (*args, *kwargs.values()):
        if isinstance(one, Tensor) and one.is_floating_point():
            return one
    raise ConfigError(
        "expected a layer that is given a floating-point tensor, got none among its arguments; "
        "name the layers of your model in memo.apply(..., layers=[...])"
    )


def tensors_in(values: Any) -> Iterator[Tensor]:
    """Tensors in nested tuples, lists and dictionaries."""
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, tuple | list):
        for one in values:
            yield from tensors_in(one)
    elif isinstance(values, dict):
        yield from tensors_in(list(values.values()))


def _replaced(values: Any, change: Any) -> Any:
    """The same nest with its tensors changed."""
    if isinstance(values, Tensor):
        return change(values)
    if type(values) in (tuple, list):
        return type(values)(_replaced(one, change) for one in values)
    if type(values) is dict:
        return {key: _replaced(one, change) for key, one in values.items()}
    return values
