"""What stands in a layer's place for its forward while a plan is applied."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch._C._dynamo.eval_frame import get_eval_frame_callback

from shared.errors import ConfigError

__all__ = ["LayerForward"]

_COMPILED = (
    "memo: expected layers that run eagerly, got a model under torch.compile: a compiled layer saves other "
    "tensors than its modules do; take torch.compile away, or do not apply a plan"
)
_CAPTURED = (
    "memo: expected layers that run eagerly, got a capture of a CUDA graph: copies to the store are no part "
    "of it; capture without a plan"
)


class LayerForward:
    """A layer's forward under a plan. A copy of the layer, or one read from a file, has its class's own."""

    def __init__(self, layer: nn.Module, run: Callable[..., Any]) -> None:
        """Takes the place of the layer's forward.

        Args:
            layer: its forward is its class's.
            run: what runs it, given the forward, its arguments and its keywords.
        """
        self._layer = weakref.ref(layer)
        self._own, self._run = layer.forward, run
        self._is_closed = False
        layer.forward = self  # type: ignore[method-assign]

    def close(self) -> None:
        """Gives the layer its own forward back; a wrapper that was put around this one since goes on to that."""
        self._is_closed = True
        layer = self._layer()
        if layer is not None and vars(layer).get("forward") is self:
            del layer.forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the layer; without gradients, as its class does.

        Raises:
            ConfigError: torch.compile or a CUDA graph is at work.
        """
        if self._is_closed:
            return self._own(*args, **kwargs)
        if torch.compiler.is_compiling():
            raise ConfigError(_COMPILED)
        if not torch.is_grad_enabled():
            return self._own(*args, **kwargs)
        if get_eval_frame_callback() not in (None, False):  # the compiler gave this frame up
            raise ConfigError(_COMPILED)
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            raise ConfigError(_CAPTURED)
        return self._run(self._own, args, kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        """Has a copy of the layer take its own forward instead of the original's."""
        return getattr, (self._layer(), "forward")
