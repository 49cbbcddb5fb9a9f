"""A layer's first forward: what it saves is counted, and items are picked up as they are made."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from memo.planner.layer_plan import ATTENTION, LayerPlan, rows_of
from memo.runtime.attention import Answer
from memo.runtime.recording.calls import PRODUCTS, NotRepeatable, RecordedCall, address, find_views
from memo.runtime.recording.dense import is_dense
from memo.runtime.recording.fingerprint import Fingerprint
from memo.runtime.recording.items import Item, is_plain
from memo.runtime.recording.random_state import random_state

__all__ = ["Recorder"]


class Recorder:
    """Listens to products and attention of one forward, and counts what autograd saves."""

    def __init__(
        self,
        plan: LayerPlan,
        names: Mapping[int, str],
        cut: int,
        pack: Callable[[Tensor], object],
        fingerprint: Callable[[Tensor], Fingerprint] | None = None,
    ) -> None:
        """Prepares a recording.

        Args:
            plan: which items are kept.
            names: names of the layer's parameters by the address of their memory.
            cut: a product's kept rows are a multiple of it, or all.
            pack: the hook through which autograd saves what `save` counts.
            fingerprint: makes one of each tensor that is saved; None: none are made.
        """
        self.fingerprints: list[Fingerprint] = []
        self._fingerprint = fingerprint
        self.calls: list[RecordedCall] = []
        self._pack = weakref.ref(pack)  # it refers to this
        self.num_saved = 0
        self._plan, self._names, self._cut = plan, names, cut
        self._live: list[Tensor] = []
        self._depth = 0

    def save(self, tensor: Tensor) -> int:
        """Counts a tensor that autograd saves, and returns its place."""
        if self._depth:
            self._live.append(tensor)
        if self._fingerprint is not None:
            self.fingerprints.append(self._fingerprint(tensor))
        self.num_saved += 1
        return self.num_saved - 1

    def _call(self, function: Callable[[], Any]) -> tuple[Any, int, list[Tensor]]:
        """Calls a function; returns its result, the first place it saved at, and what it saved."""
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
        if hooks is None or hooks[0] is not self._pack():
            raise NotRepeatable(
                "has hooks for saved tensors of its own (torch.utils.checkpoint, save_on_cpu)"
            )
        first, self._live = self.num_saved, []
        self._depth += 1
        try:
            out = function()
        finally:
            self._depth -= 1
            saved, self._live = self._live, []
        return out, first, saved

    def finished_calls(self) -> list[RecordedCall]:
        """The calls, without items that are not needed again or were written to since; this forgets them."""
        # Autograd holds its hooks, and so this, for as long as what they saved.
        calls, self.calls = self.calls, []
        found = []
        for call in calls:
            if call.item is not None and call.item.has_changed:
                call = replace(call, item=None, views=None)
            elif call.last == self.num_saved and not call.saves_item:
                call = replace(call, item=None)
            found.append(call)
        return found

    def product(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Computes a matrix product, and keeps its first rows as an item where the plan says so."""
        if self._depth:  # inside attention, which is answered as a whole
            return function(*args, **kwargs)
        out, first, saved = self._call(lambda: function(*args, **kwargs))
        views, item, tail = None, None, None
        rows_at, weight_at = PRODUCTS[function]
        if not kwargs and len(args) > weight_at and all(map(is_plain, (*args[:2], out))):
            rows, weight = args[rows_at], args[weight_at]
            found = find_views(saved, [rows, weight])
            num_rows = out.numel() // max(out.shape[-1], 1)
            if None not in found and out.is_contiguous() and is_dense(out) and out.ndim > 1:
                views = tuple(found)
                name = self._names.get(address(weight), f"product_{len(self.calls)}")
                kept = self._rows(name, num_rows)
                item = Item.of(name, [out], kept, num_rows) if kept else None
                if item is not None and kept < num_rows and self._fingerprint is not None:
                    tail = self._fingerprint(out.detach().view(num_rows, -1)[kept:])
        self.calls.append(
            RecordedCall(first, self.num_saved, views, item, _requires_grad(out), tail=tail)  # type: ignore[arg-type]
        )
        return out

    def _rows(self, name: str, num_rows: int) -> int:
        if name in self._plan.resident:
            return num_rows
        return rows_of(num_rows, self._plan.fraction(name), self._cut)

    def attend(
        self, call: Callable[[], Answer], query: Tensor, key: Tensor, value: Tensor
    ) -> Answer:
        """Computes attention, and keeps its result and what it saves for itself."""
        before = random_state(query)
        (out, weights), first, saved = self._call(call)
        plan = self._plan
        is_kept = ATTENTION in plan.resident or plan.fraction(ATTENTION) > 0
        if not is_kept or weights is not None or not all(map(is_plain, (query, key, value, out))):
            self.calls.append(RecordedCall(first, self.num_saved, None, None, _requires_grad(out)))
            return out, weights
        sources = [query, key, value, out]
        found = find_views(saved, sources)
        # What stays where it is comes last: the item's tensors are counted first.
        for at in sorted(range(len(saved)), key=lambda at: _stays(saved[at], out)):
            tensor = saved[at]
            if found[at] is None:  # sums of the softmax, masks of dropout, a copy of the result
                (found[at],) = find_views([tensor], sources)
                if found[at] is None:
                    sources.append(tensor)
                    (found[at],) = find_views([tensor], sources)
        after = random_state(query)
        drew = before is not None and after is not None and not torch.equal(before, after)
        self.calls.append(
            RecordedCall(
                first,
                self.num_saved,
                tuple(found),  # type: ignore[arg-type]
                Item.of(ATTENTION, [out, *(one for one in sources[4:] if not _stays(one, out))]),
                _requires_grad(out),
                after if drew else None,
                tuple(one.detach() for one in sources[4:] if _stays(one, out)),
            )
        )
        return out, weights


def _stays(tensor: Tensor, out: Tensor) -> bool:
    """Whether what attention saved beside its result cannot move with it: it lies elsewhere, or is nothing."""
    return tensor.device != out.device or tensor.numel() == 0


def _requires_grad(out: Any) -> bool:
    return isinstance(out, Tensor) and out.requires_grad
