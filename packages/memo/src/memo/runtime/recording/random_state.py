"""Random numbers as they were: what is computed again must draw alike."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

__all__ = ["Generators", "random_state", "set_random_state"]


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


class Generators:
    """The generators that a layer may draw from without naming them: torch's, numpy's and Python's."""

    def __init__(self, tensor: Tensor) -> None:
        """Notes their states.

        Args:
            tensor: the layer's input, on whose device it computes.
        """
        self._access = {**_GENERATORS}
        if tensor.is_cuda:
            device = tensor.device
            self._access["cuda"] = (
                partial(torch.cuda.get_rng_state, device),
                partial(torch.cuda.set_rng_state, device=device),
            )
        # Under fake tensors states would be fake.
        self._states = {} if isinstance(tensor, FakeTensor) else self._read(self._access)

    def keep_drawn(self) -> None:
        """Forgets the states of generators that have drawn nothing since."""
        self._states = {name: self._states[name] for name in self.drawn}

    @property
    def drawn(self) -> list[str]:
        """Names of the generators that have drawn since."""
        now = self._read(self._states)
        return [name for name, state in self._states.items() if not _is_same(state, now[name])]

    @contextmanager
    def replay(self) -> Iterator[None]:
        """Draws from the states, and leaves the generators afterwards as they are before."""
        before = self._read(self._states)
        try:
            self._write(self._states)
            yield
        finally:
            self._write(before)

    def _read(self, names: Any) -> dict[str, Any]:
        return {name: self._access[name][0]() for name in names}

    def _write(self, states: dict[str, Any]) -> None:
        for name, state in states.items():
            self._access[name][1](state)


_GENERATORS: dict[str, tuple[Callable[[], Any], Callable[[Any], None]]] = {
    "torch": (torch.get_rng_state, torch.set_rng_state),
    "numpy": (np.random.get_state, np.random.set_state),
    "python": (random.getstate, random.setstate),
}


def _is_same(one: Any, other: Any) -> bool:
    """Whether two states are the same; numpy's is a tuple with an array in it."""
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, tuple) and len(one) > 1 and isinstance(one[1], np.ndarray):
        return one[2:] == other[2:] and np.array_equal(one[1], other[1])
    return bool(one == other)
