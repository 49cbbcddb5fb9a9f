"""Attention as the boundary in a layer: who is listening sees each call, and may answer it.

transformers' models look their attention function up by a name of their configuration. While
`listening` holds, names lead to a function that hands the call to the listener of this thread's
running layer, and otherwise calls what stood there. Nothing of a model is rewritten.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

__all__ = ["AttentionListener", "listening", "offer_attention"]

Answer = tuple[Tensor, Tensor | None]


@runtime_checkable
class AttentionListener(Protocol):
    """What handles attention calls of a running layer."""

    def attend(self, call: partial[Answer], query: Tensor, key: Tensor, value: Tensor) -> Answer:
        """Calls attention, or answers in its place.

        Args:
            call: the model's own attention on these tensors: a partial of its function with the attention
                module, the three tensors and its settings.
            query, key, value: as transformers passes them, [batch, heads, tokens, head_dim].
        """
        ...


_listener: ContextVar[AttentionListener | None] = ContextVar("listener", default=None)


@contextmanager
def listening(listener: AttentionListener | None) -> Iterator[None]:
    """Hands attention calls of this thread to a listener; None: to nobody."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


def offer_attention(name: str) -> Callable[[], None]:
    """Offers calls of the attention function of a name to listeners.

    Args:
        name: what a model's configuration calls its attention, "sdpa" or "eager" for instance.

    Returns:
        What takes the offer back; the last one leaves the name as it was.
    """
    count, restore = _offers.get(name) or (0, _replace(name))
    _offers[name] = count + 1, restore

    def take_back() -> None:
        count, restore = _offers.pop(name)
        if count > 1:
            _offers[name] = count - 1, restore
        else:
            restore()

    return take_back


def _replace(name: str) -> Callable[[], None]:
    """Puts a function that hands calls to listeners in a name's place; returns what undoes it."""
    inner = ALL_ATTENTION_FUNCTIONS.get(name)
    had_own = inner is not AttentionInterface().get(name)  # a fresh one has only what is registered

    def attend(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **settings: Any
    ) -> Answer:
        function: Any = inner
        if function is None:  # "eager" is a function of each model's own module
            function = vars(sys.modules[type(module).__module__])["eager_attention_forward"]
        listener = _listener.get()

        call = partial(function, module, query, key, value, *args, **settings)
        return call() if listener is None else listener.attend(call, query, key, value)

    ALL_ATTENTION_FUNCTIONS[name] = attend
    if had_own:
        return lambda: ALL_ATTENTION_FUNCTIONS.__setitem__(name, inner)
    return lambda: ALL_ATTENTION_FUNCTIONS.__delitem__(name)


_offers: dict[str, tuple[int, Callable[[], None]]] = {}
"""How often each name is offered now, and what takes its offer back."""
