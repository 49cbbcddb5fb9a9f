"""Matrix products and attention calls inside a layer's forward: noticed, numbered, and later answered."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from memo.planner.layer_plan import ATTENTION
from memo.runtime.recording.fingerprint import Fingerprint
from memo.runtime.recording.items import Item
from shared.errors import ConfigError

__all__ = [
    "PRODUCTS",
    "NotRepeatable",
    "Products",
    "RecordedCall",
    "SavedView",
    "address",
    "find_views",
]


class NotRepeatable(ConfigError):
    """A layer whose forward does something else, or changes something, when it runs again.

    Attributes:
        what: what was seen.
    """

    def __init__(self, what: str, layer: str = "") -> None:
        """Says what was seen, and the way out.

        Args:
            what: goes on after "got one that".
            layer: its name, where it is known.
        """
        self.what = what
        super().__init__(
            f"{layer}{': ' if layer else ''}expected a layer whose forward may run again, got one that {what}; give "
            "it mode 'whole', which stores all that it saves, or 'keep'"
        )


PRODUCTS: dict[Any, tuple[int, int]] = {functional.linear: (0, 1), torch.addmm: (1, 2)}
"""Matrix products whose rows are independent: which argument has the rows, and which the weight."""


@dataclass(frozen=True, slots=True)
class SavedView:
    """A tensor that a call saved, as a view of something that is there when the call is answered.

    Attributes:
        source: number of the argument, or of a tensor of the item or beside it, counted on after the arguments.
        shape, stride: of the saved tensor.
        offset: elements between its beginning and the source's.
        dtype: differs from the source's where autocast converted it.
    """

    source: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    def of(self, sources: Sequence[Tensor]) -> Tensor:
        """The saved tensor over new sources."""
        tensor = sources[self.source].detach()
        if tensor.dtype != self.dtype:
            tensor = tensor.to(self.dtype)
        return tensor.as_strided(self.shape, self.stride, tensor.storage_offset() + self.offset)


@dataclass(frozen=True, slots=True)
class RecordedCall:
    """A call of a product or of attention in a layer's first forward.

    Attributes:
        first, last: places of the tensors that it saved, half-open.
        views: what these are; None where one of them cannot be told, and the call cannot be answered.
        item: what answers it; None: it is computed again where its result is needed.
        aside: what it saved that stays where it is: on another device, as a GPU's attention saves seeds in RAM, or empty.
        requires_grad: whether its result does.
        rng_after: state of random numbers after it, where it drew some.
        tail: of a product's rows that are not kept.
    """

    first: int
    last: int
    views: tuple[SavedView, ...] | None
    item: Item | None
    requires_grad: bool
    rng_after: Tensor | None = None
    aside: tuple[Tensor, ...] = ()
    tail: Fingerprint | None = None

    @property
    def saves_item(self) -> bool:
        """Whether it saves what it makes itself, as attention does."""
        num_arguments = 3 if self.item is not None and self.item.name == ATTENTION else 2
        return any(view.source >= num_arguments for view in self.views or ())


class Products(TorchFunctionMode):
    """Hands matrix products to a function; every other operation goes its own way."""

    def __init__(self, handle: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]) -> None:
        """Takes what handles products: of the function, its arguments and its keywords."""
        super().__init__()
        self._handle = handle

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Called by torch for every function on tensors while the mode is on."""
        if kwargs is None:
            kwargs = {}
        if func in PRODUCTS:
            return self._handle(func, args, kwargs)
        if kwargs.get("generator") not in (None, torch.default_generator):
            raise NotRepeatable(f"calls {func.__name__} with a generator of its own")
        return func(*args, **kwargs)


def address(tensor: Tensor) -> int:
    """Address of a tensor's storage, which its views share, whether its memory is there or not."""
    return tensor.untyped_storage()._cdata


def find_views(saved: Sequence[Tensor], sources: Sequence[Tensor]) -> list[SavedView | None]:
    """What each saved tensor is a view of; None for those that lie over no source.

    Args:
        saved: tensors that a call saved, still alive.
        sources: its arguments, and what it made.
    """
    return [_find(tensor, sources) for tensor in saved]


def _find(tensor: Tensor, sources: Sequence[Tensor]) -> SavedView | None:
    shape, stride = tuple(tensor.shape), tensor.stride()
    for number, source in enumerate(sources):
        if address(source) == address(tensor):
            offset = int(tensor.storage_offset() - source.storage_offset())
            return SavedView(number, shape, stride, offset, tensor.dtype)
    if tensor.storage_offset() == 0:
        for number, source in enumerate(sources):  # autocast makes converted copies of arguments
            if source.dtype != tensor.dtype and (shape, stride) in _layouts(source):
                return SavedView(number, shape, stride, 0, tensor.dtype)
    return None


def _layouts(source: Tensor) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Geometries in which a product saves a converted, contiguous argument."""
    if not source.is_contiguous() or source.ndim < 2:
        return []
    width = source.shape[-1]
    rows = source.numel() // max(width, 1)
    return [
        (tuple(source.shape), source.stride()),
        ((rows, width), (width, 1)),
        *([((width, rows), (1, width))] if source.ndim == 2 else []),
    ]
