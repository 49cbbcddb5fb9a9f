"""Random numbers and autocast as they were: what is computed again must draw and round alike."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

__all__ = ["Autocast", "random_state", "replaying", "set_random_state"]


def random_state(tensor: Tensor | None) -> Tensor | None:
    """State of the random numbers that operations on a tensor draw from; None where there are none."""
    if tensor is None or isinstance(tensor, FakeTensor):
        return None
    if tensor.is_cuda:
        return torch.cuda.get_rng_state(tensor.device)
    return torch.get_rng_state() if tensor.device.type == "cpu" else None


def set_random_state(tensor: Tensor, state: Tensor) -> None:
    """Continues random numbers on a tensor's device from a state."""
    if tensor.is_cuda:
        torch.cuda.set_rng_state(state, tensor.device)
    else:
        torch.set_rng_state(state)


@contextmanager
def replaying(tensor: Tensor | None, state: Tensor | None) -> Iterator[None]:
    """Draws random numbers from a state, and leaves them afterwards as they are now."""
    if tensor is None or state is None:
        yield
        return
    before = random_state(tensor)
    set_random_state(tensor, state)
    try:
        yield
    finally:
        assert before is not None
        set_random_state(tensor, before)


class Autocast:
    """Autocast's settings of a device, to be entered again."""

    def __init__(self, device_type: str) -> None:
        """Notes them as they are now."""
        self._type = device_type
        self._is_enabled = torch.is_autocast_enabled(device_type)
        self._dtype = torch.get_autocast_dtype(device_type)
        self._has_cache = torch.is_autocast_cache_enabled()

    def enter(self) -> torch.autocast:
        """A context in which they hold."""
        return torch.autocast(
            self._type, dtype=self._dtype, enabled=self._is_enabled, cache_enabled=self._has_cache
        )
