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
from typing import Any, Protocol

from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

__all__ = ["AttentionListener", "listening", "offer_attention"]

Answer = tuple[Tensor, Tensor | None]


class AttentionListener(Protocol):
    """What handles attention calls of a running layer."""

    def attend(
        self, call: Callable[[], Answer], query: Tensor, key: Tensor, value: Tensor
    ) -> Answer:
        """Calls attention, or answers in its place.

        Args:
            call: the model's own attention on these tensors.
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
        What takes the offer back and leaves the name as it was.
    """
    inner = ALL_ATTENTION_FUNCTIONS.get(name)
    had_own = inner is not AttentionInterface().get(name)  # a fresh one has only what is registered

    def attend(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **settings: Any
    ) -> Answer:
        function: Any = inner
        if function is None:  # "eager" is a function of each model's own module
            function = vars(sys.modules[type(module).__module__])["eager_attention_forward"]
        listener = _listener.get()

        def call() -> Answer:
            return function(module, query, key, value, *args, **settings)

        return call() if listener is None else listener.attend(call, query, key, value)

    ALL_ATTENTION_FUNCTIONS[name] = attend

    def restore() -> None:
        if had_own:
            ALL_ATTENTION_FUNCTIONS[name] = inner
        else:
            del ALL_ATTENTION_FUNCTIONS[name]

    return restore
