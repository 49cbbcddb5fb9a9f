"""One forward of a layer that is never run again: all that autograd saves is stored as it lies in memory.

For layers that another forward would change: batch norm while it trains, random generators of a
layer's own, branches on what changes. Saved tensors may be views of one another (a matrix and its
transpose); each storage is kept once, and they come back as the same views over the same memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from memo.runtime.recording.arguments import Arguments, Outside
from memo.runtime.recording.calls import address
from memo.runtime.recording.items import Item, Watch, is_plain
from memo.runtime.recording.record import Memory, refuse_differentiation

__all__ = ["WholeRecord"]

_SAVED = "saved"
"""Name of the one item: all storages that autograd saved of."""


_WORD_BYTES = 16
"""Of the longest element there is: places of views in a stretch stay multiples of their elements."""


@dataclass(slots=True)
class _View:
    """A saved tensor over one of the item's tensors.

    Attributes:
        tensor: while the forward runs; it keeps its storage alive, so that no other takes its address.
        watch: notices changes since it was saved.
        span, offset_bytes: which of the item's tensors it lies in, and where it begins there.
    """

    tensor: Tensor | None
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    watch: Watch
    span: int = 0
    offset_bytes: int = 0


class WholeRecord:
    """One forward of a layer, of which everything is kept that autograd saved.

    Attributes:
        items: one item, whose tensors are the stretches of memory that saved tensors lie in.
    """

    def __init__(
        self,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        parameters: Callable[[], Memory],
        fetch: Callable[[WholeRecord], None],
    ) -> None:
        """Prepares the recording of one forward.

        Args:
            forward: the layer's own.
            args, kwargs: what it is called with.
            parameters: the layer's parameters and buffers, now.
            fetch: brings the item back.

        Raises:
            ConfigError: no floating-point tensor is among the arguments.
        """
        self.items: list[Item] = []
        self._forward, self._args, self._kwargs = forward, args, kwargs
        arguments = Arguments(args, kwargs)
        self._outside = {*parameters(), *map(address, arguments.others())}
        assert arguments.source is not None
        self._device = arguments.source.device
        self._fetch = fetch
        self._views: list[_View] = []
        self._untaken: set[int] = set()

    def run(self) -> Any:
        """Runs the layer's forward, and notes what autograd saves."""
        with saved_tensors_hooks(self._pack, self._unpack):
            out = self._forward(*self._args, **self._kwargs)
        del self._args, self._kwargs, self._forward
        if self._views:
            self.items = [self._gather()]
        return out

    @property
    def is_taken(self) -> bool:
        """Whether nothing that was fetched is still to be asked for."""
        return not self._untaken

    def _pack(self, tensor: Tensor) -> object:
        if not self._can_move(tensor) or address(tensor) in self._outside:
            return Outside(tensor)
        shape, stride = tuple(tensor.shape), tensor.stride()
        self._views.append(_View(tensor.detach(), shape, stride, tensor.dtype, Watch(tensor)))
        return len(self._views) - 1

    def _can_move(self, tensor: Tensor) -> bool:
        is_lazy = tensor.is_conj() or tensor.is_neg()  # views that memory alone does not describe
        return (
            is_plain(tensor)
            and tensor.device == self._device
            and tensor.numel() > 0
            and not is_lazy
        )

    def _gather(self) -> Item:
        """The stretches of memory that the views lie in, one a storage."""
        extents: dict[int, tuple[int, int]] = {}
        for view in self._views:
            assert view.tensor is not None
            at = address(view.tensor)
            begin, end = _extent(view)
            begin -= begin % _WORD_BYTES
            low, high = extents.get(at, (begin, end))
            extents[at] = min(low, begin), max(high, end)
        places = {at: number for number, at in enumerate(extents)}
        spans: dict[int, Tensor] = {}
        for view in self._views:
            assert view.tensor is not None
            at = address(view.tensor)
            low, high = extents[at]
            if at not in spans:
                memory = torch.empty(0, dtype=torch.uint8, device=view.tensor.device)
                spans[at] = memory.set_(view.tensor.untyped_storage(), low, (high - low,), (1,))
            view.span, view.offset_bytes = places[at], _extent(view)[0] - low
            view.tensor = None
        return Item.of(_SAVED, list(spans.values()))

    def _unpack(self, packed: object) -> Tensor:
        if isinstance(packed, Outside):
            return packed.unpack()
        assert isinstance(packed, int)
        if packed not in self._untaken:
            refuse_differentiation()
            self._fetch(self)
            self._untaken = set(range(len(self._views)))
        self._untaken.remove(packed)
        view = self._views[packed]
        view.watch.check("what a layer saved for its backward")
        memory = self.items[0].tensors[view.span]
        whole = torch.empty(0, dtype=view.dtype, device=memory.device)
        begin = memory.storage_offset() + view.offset_bytes
        return whole.set_(
            memory.untyped_storage(), begin // view.dtype.itemsize, view.shape, view.stride
        )


def _extent(view: _View) -> tuple[int, int]:
    """First byte of a view in its storage, and the one after its last."""
    assert view.tensor is not None
    begin = int(view.tensor.storage_offset())
    pairs = zip(view.shape, view.stride, strict=True)
    last = begin + sum((size - 1) * stride for size, stride in pairs)
    return begin * view.dtype.itemsize, (last + 1) * view.dtype.itemsize
