"""Attention of a layer that goes by tiles, whose result is kept: its graph without its inputs.

Queries, keys and values are made again in the backward, tile by tile; attention is not. Its graph holds none
of these, and finds them and the kept item when it runs backward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks

from memo.planner.layer_plan import LayerPlan
from memo.runtime.recording.calls import SavedView, address
from memo.runtime.recording.items import Item, is_plain
from memo.runtime.recording.recorder import Recorder
from memo.runtime.tiling.split_layer import AttentionCall

__all__ = ["Heads", "KeptAttention"]

Heads = tuple[Tensor, Tensor, Tensor]
"""Whole queries, keys and values, [batch, heads, tokens, head_dim]."""


class _Entry(torch.autograd.Function):
    """Where attention's graph ends: unlike a leaf it holds no memory of the tensor."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, tensor: Tensor) -> Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:  # type: ignore[override]
        return None, grad


class KeptAttention:
    """Attention's graph whose saved tensors are queries, keys and values, which are made again, and an item.

    Attributes:
        item: attention's result, and what else it saved.
    """

    def __init__(
        self,
        item: Item,
        aside: tuple[Tensor, ...],
        sources: list[Tensor],
        out: GradientEdge,
        heads: list[GradientEdge],
    ) -> None:
        """Takes the item and what is beside it, the list through which the graph finds both, and its ends."""
        self.item, self._aside = item, aside
        self._sources, self._out, self._heads = sources, out, heads

    @classmethod
    def run(
        cls, heads: Heads, attention: AttentionCall, plan: LayerPlan, outside: set[int]
    ) -> tuple[KeptAttention | None, Tensor]:
        """Calls attention; returns no graph where the plan keeps none, or attention cannot be kept."""
        sources: list[Tensor] = []
        views: list[SavedView] = []

        def pack(tensor: Tensor) -> Tensor | int:
            if not is_plain(tensor) or address(tensor) in outside:
                return tensor.detach()
            return recorder.save(tensor)

        recorder = Recorder(plan, {}, 1, pack)

        def unpack(packed: Tensor | int) -> Tensor:
            return packed if isinstance(packed, Tensor) else views[packed].of(sources)

        with torch.enable_grad(), saved_tensors_hooks(pack, unpack):
            anchor = heads[0].new_empty(0).requires_grad_()
            entered = [_Entry.apply(anchor, one) for one in heads]
            answer, _ = recorder.attend(lambda: attention(*entered), *entered)  # type: ignore[misc]
        (call,) = recorder.calls
        if call.item is None or call.views is None:
            return None, answer.detach()
        views.extend(call.views)
        ends = [get_gradient_edge(one) for one in entered]
        edge = get_gradient_edge(answer)
        return cls(call.item, call.aside, sources, edge, ends), answer.detach()

    def backward(self, heads: Heads, grad: Tensor) -> Heads:
        """Gradients of queries, keys and values, given these and the gradient of the result."""
        self._sources[:] = [*heads, *self.item.tensors, *self._aside]
        try:
            # The graph holds no memory of its own, and lives as long as the layer's.
            return torch.autograd.grad(  # type: ignore[return-value]
                self._out, self._heads, grad, retain_graph=True
            )
        finally:
            self._sources.clear()
