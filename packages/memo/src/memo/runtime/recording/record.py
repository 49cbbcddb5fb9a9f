"""What one forward of a layer leaves for its backward, instead of what autograd would save.

The layer's own forward runs under hooks for saved tensors, which keep a tensor's place in the order
of saving and nothing else. When the backward first asks for one, the layer's forward runs again with
items answered from where they were kept (after MEMO's token-wise recomputation, arXiv 2407.12117), and
what autograd saves then, in the same order, is what it gets.

Departure: all rows run again, but of matrix products only those that were not kept. So saved tensors
come out in their own geometry, element-wise results are never stored, and a layer needs no proof
that its rows are independent: only those of a matrix product are taken apart.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from memo.planner.layer_plan import INPUT, LayerPlan
from memo.runtime.attention import listening
from memo.runtime.recording.calls import Products, address
from memo.runtime.recording.items import Item, is_plain
from memo.runtime.recording.random_state import Autocast, random_state, replaying
from memo.runtime.recording.recorder import Recorder
from memo.runtime.recording.replayer import Complete, Replayer
from shared.errors import ConfigError

__all__ = ["LayerRecord", "Outside"]


class Outside:
    """A parameter, a buffer or an argument of all layers that autograd saves: it lives on anyhow."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: Tensor) -> None:
        """Notes its version, as autograd would."""
        self.tensor, self.version = tensor.detach(), tensor._version

    def unpack(self) -> Tensor:
        """The tensor.

        Raises:
            RuntimeError: it was changed in place since.
        """
        if self.tensor._version != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace "
                f"operation: {list(self.tensor.shape)} is at version {self.tensor._version}; expected "
                f"version {self.version} instead"
            )
        return self.tensor


class LayerRecord:
    """One forward of a layer, which restores what autograd saved in it.

    Attributes:
        items: what is kept, the layer's input first; filled when the forward is over.
    """

    def __init__(
        self,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        plan: LayerPlan,
        parameters: Callable[[], Mapping[int, str]],
        cut: int,
        fetch: Callable[[LayerRecord], None],
    ) -> None:
        """Prepares the recording of one forward.

        Args:
            forward: the layer's own.
            args, kwargs: what it is called with; its input is the first tensor that requires gradients,
                or the first one.
            plan: what is kept of it.
            parameters: names of the layer's parameters and buffers by the address of their memory, now.
            cut: a product's kept rows are a multiple of it, or all.
            fetch: brings items back that were stored.
        """
        self.items: list[Item] = []
        self._forward, self._args, self._kwargs = forward, args, kwargs
        self._parameters, self._fetch = parameters, fetch
        self._plan, self._cut = plan, cut
        self._restored: dict[int, Tensor] = {}

    def run(self) -> Any:
        """Runs the layer's forward and records it."""
        source = _find_input(self._args, self._kwargs)
        names = self._parameters()
        outside = self._outside(names, source)
        recorder = Recorder(self._plan, names, self._cut)
        self._autocast = Autocast(source.device.type)
        self._rng = random_state(source)

        def pack(tensor: Tensor) -> object:
            if not is_plain(tensor) or address(tensor) in outside:
                return Outside(tensor)
            return self, recorder.save(tensor)

        with (
            saved_tensors_hooks(pack, _unpack),
            listening(recorder),
            Products(recorder.product),
        ):
            out = self._forward(*self._args, **self._kwargs)
        end = random_state(source)
        if self._rng is not None and end is not None and torch.equal(self._rng, end):
            self._rng = None
        self._num_saved, self._calls = recorder.num_saved, recorder.calls
        if self._num_saved:
            # What nothing was saved after is not needed again.
            items = [call.item for call in self._calls if call.last < self._num_saved]
            self.items = [Item.of(INPUT, [source]), *(item for item in items if item is not None)]
        self._requires_grad = source.requires_grad
        self._args = tuple(_INPUT if one is source else one for one in self._args)
        self._kwargs = {k: _INPUT if one is source else one for k, one in self._kwargs.items()}
        return out

    def _outside(self, names: Mapping[int, str], source: Tensor) -> set[int]:
        """Addresses of memory that lives on anyhow."""
        given = (one for one in _tensors((self._args, self._kwargs)) if one is not source)
        return {*names, *map(address, given)}

    @property
    def is_taken(self) -> bool:
        """Whether nothing that was restored is still to be asked for."""
        return not self._restored

    def take(self, index: int) -> Tensor:
        """The saved tensor of a place, once; restores all when it is not there."""
        if index not in self._restored:
            self.restore()
        return self._restored.pop(index)

    def restore(self) -> None:
        """Runs the layer's forward again, as far as something is saved, with items answered."""
        if torch.is_grad_enabled():
            raise RuntimeError(
                "memo: expected a backward that is not differentiated again, got create_graph=True; run it "
                "outside of memo.apply"
            )
        self._fetch(self)
        for item in self.items:
            item.check_unchanged()
        (kept,) = self.items[0].tensors
        source = kept.detach().requires_grad_(self._requires_grad)
        args, kwargs = _filled((self._args, self._kwargs), source)
        outside = self._outside(self._parameters(), source)
        replayer = Replayer(self._calls, self._num_saved)

        def capture(tensor: Tensor) -> None:
            if is_plain(tensor) and address(tensor) not in outside:
                replayer.save(tensor)

        with (
            contextlib.suppress(Complete),
            torch.enable_grad(),
            replaying(source, self._rng),
            self._autocast.enter(),
            saved_tensors_hooks(capture, _never),
            listening(replayer),
            Products(replayer.product),
        ):
            self._forward(*args, **kwargs)
        if len(replayer.saved) != self._num_saved:
            raise RuntimeError(
                f"memo: expected a layer to save {self._num_saved} tensors when its forward runs again, got "
                f"{len(replayer.saved)}: it depends on more than its arguments and its random numbers; give "
                "it mode 'whole' or 'keep'"
            )
        self._restored = dict(enumerate(replayer.saved))


_INPUT: Any = object()
"""Stands for a layer's input among its arguments."""


def _unpack(packed: Any) -> Tensor:
    if isinstance(packed, Outside):
        return packed.unpack()
    record, index = packed
    return record.take(index)


def _never(_: object) -> Tensor:
    raise AssertionError("a graph that only served to save tensors was run backward")


def _tensors(values: Any) -> Iterator[Tensor]:
    """Tensors in nested tuples, lists and dictionaries."""
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, tuple | list):
        for one in values:
            yield from _tensors(one)
    elif isinstance(values, dict):
        yield from _tensors(list(values.values()))


def _find_input(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The layer's input: the first floating-point tensor it is given by itself.

    Raises:
        ConfigError: there is none.
    """
    for one in (*args, *kwargs.values()):
        if isinstance(one, Tensor) and one.is_floating_point():
            return one
    raise ConfigError(
        "expected a layer that is given a floating-point tensor, got none among its arguments; name the "
        "layers of your model in memo.apply(..., layers=[...])"
    )


def _filled(values: Any, source: Tensor) -> Any:
    """Arguments with the input in its place, and the others apart from the first forward's graph."""
    if values is _INPUT:
        return source
    if isinstance(values, Tensor):
        return values.detach().requires_grad_(values.requires_grad)
    if isinstance(values, tuple):
        return tuple(_filled(one, source) for one in values)
    if isinstance(values, list):
        return [_filled(one, source) for one in values]
    if isinstance(values, dict):
        return {key: _filled(one, source) for key, one in values.items()}
    return values
