"""A layer's forward run again: items answer its calls, and what autograd saves then is kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from memo.runtime.attention import Answer
from memo.runtime.recording.calls import PRODUCTS, NotRepeatable, RecordedCall
from memo.runtime.recording.fingerprint import Fingerprint
from memo.runtime.recording.random_state import set_random_state

__all__ = ["Complete", "Replayer"]


class Complete(BaseException):
    """All saved tensors are there: the rest of the layer's forward is not needed again.

    No layer that handles exceptions may take it for one of its own.
    """


class Replayer:
    """Answers products and attention of one forward, and keeps what autograd saves.

    A call without an item is made again. Where nothing is saved after it, it is not computed: autograd saves
    what a call is given before that, and with the last tensor the forward ends.

    Attributes:
        saved: what autograd saved so far.
        differs: whether the last of it is not what the first forward saved.
    """

    def __init__(
        self, calls: Sequence[RecordedCall], fingerprints: Sequence[Fingerprint], *, is_exact: bool
    ) -> None:
        """Prepares the answers.

        Args:
            calls: of the first forward.
            fingerprints: of each tensor that it saved.
            is_exact: whether the same bits are expected, and not only the same up to rounding.
        """
        self.saved: list[Tensor] = []
        self.differs = False
        self._calls, self._fingerprints = iter(calls), fingerprints
        self._is_exact = is_exact
        self._depth = 0

    def save(self, tensor: Tensor) -> None:
        """Keeps the next tensor that autograd saves.

        Raises:
            Complete: it was the last one, or it is another one than the first forward saved.
        """
        fingerprint = self._fingerprints[len(self.saved)]
        self.saved.append(tensor.detach())
        self.differs = not fingerprint.matches(tensor, is_exact=self._is_exact)
        if self.differs or len(self.saved) == len(self._fingerprints):
            raise Complete

    def product(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Answers a matrix product: kept rows from its item, the others computed."""
        if self._depth:
            return function(*args, **kwargs)
        call = self._next_call()
        if call.item is None:
            return function(*args, **kwargs)
        assert call.views is not None
        rows_at, weight_at = PRODUCTS[function]
        for view in call.views:
            self.save(view.of([args[rows_at], args[weight_at]]))
        with torch.no_grad():
            (out,) = call.item.tensors
            rows = call.item.rows
            if rows < call.item.num_rows:
                width = args[rows_at].shape[-1]
                tail = list(args)
                tail[rows_at] = args[rows_at].reshape(-1, width)[rows:]
                computed = function(*tail)
                self._compare_tail(call.tail, computed)
                out.view(-1, out.shape[-1])[rows:] = computed
        return out.detach().requires_grad_(call.requires_grad)

    def _compare_tail(self, tail: Fingerprint | None, computed: Tensor) -> None:
        """Expects the same only up to rounding from here on, where a product of fewer rows rounds otherwise."""
        assert tail is not None
        if self._is_exact and not tail.matches(computed, is_exact=True):
            self._is_exact = False
        if not self._is_exact and not tail.matches(computed, is_exact=False):
            self.saved.append(computed)
            self.differs = True
            raise Complete

    def attend(
        self, call: Callable[[], Answer], query: Tensor, key: Tensor, value: Tensor
    ) -> Answer:
        """Answers attention from its item."""
        noted = self._next_call()
        if noted.item is None:
            self._depth += 1
            try:
                return call()
            finally:
                self._depth -= 1
        assert noted.views is not None
        sources = [query, key, value, *noted.item.tensors, *noted.aside]
        for view in noted.views:
            self.save(view.of(sources))
        if noted.rng_after is not None:
            set_random_state(query, noted.rng_after)
        return noted.item.tensors[0].detach().requires_grad_(noted.requires_grad), None

    def _next_call(self) -> RecordedCall:
        call = next(self._calls, None)
        if call is None or call.first != len(self.saved):
            raise NotRepeatable("takes another way the second time")
        return call
