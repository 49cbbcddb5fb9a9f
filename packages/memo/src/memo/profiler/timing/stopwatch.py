"""What each product and attention of a layer's forward takes, by any clock."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from memo.planner.layer_plan import ATTENTION
from memo.runtime.attention import Answer
from memo.runtime.recording.calls import PRODUCTS, address

__all__ = ["Stopwatch"]


class Stopwatch:
    """Listens to products and attention of a forward, and takes the time of each.

    Attributes:
        spent: by the weight's name, and of attention: differences of the clock.
    """

    def __init__(self, names: Mapping[int, str], now: Callable[[], Any]) -> None:
        """Takes names of the layer's parameters by their memory, and the clock."""
        self.spent: dict[str, Any] = {}
        self._names, self._now = names, now
        self._depth = 0

    def _timed(self, name: str, call: Callable[[], Any]) -> Any:
        self._depth += 1
        started = self._now()
        try:
            return call()
        finally:
            self._depth -= 1
            spent = self._now() - started
            self.spent[name] = self.spent[name] + spent if name in self.spent else spent

    def product(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Takes the time of a matrix product outside of attention."""
        weight = args[PRODUCTS[function][1]] if len(args) > 1 else None
        if self._depth or not isinstance(weight, Tensor):
            return function(*args, **kwargs)
        name = self._names.get(address(weight), "product")
        return self._timed(name, lambda: function(*args, **kwargs))

    def attend(
        self, call: Callable[[], Answer], query: Tensor, key: Tensor, value: Tensor
    ) -> Answer:
        """Takes the time of attention."""
        return self._timed(ATTENTION, call)
