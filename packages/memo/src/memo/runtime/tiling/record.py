"""One forward of a layer by tiles, and its backward.

A layer's parts before and after attention are row-local, so they run tile by tile, forward and backward,
and nothing of a tile outlives it; attention alone sees whole tensors. What a layer takes is then its
input, queries, keys, values, attention's result and the gradients of these, and one tile. The idea is
that of tiled computation in Arctic Long Sequence Training (arXiv 2506.13996), there of the feed-forward
part; here of all that is row-local, with the layer's own forward, and together with stored items.

Departure from plain training: gradients of weights are sums over tiles, which round otherwise.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from memo.planner.layer_plan import INPUT, LayerPlan
from memo.runtime.recording.calls import address
from memo.runtime.recording.fingerprint import Fingerprint
from memo.runtime.recording.items import Item
from memo.runtime.recording.layer_state import LayerState
from memo.runtime.recording.record import other_values, refuse_differentiation
from memo.runtime.tiling.arguments import TileArguments
from memo.runtime.tiling.kept_attention import Heads, KeptAttention
from memo.runtime.tiling.row_locality import Proofs
from memo.runtime.tiling.split_layer import AttentionCall, SplitLayer, refuse

__all__ = ["TiledRecord"]


class TiledRecord:
    """One forward of a layer by tiles.

    Attributes:
        items: what is kept, the layer's input first, and attention's result where the plan keeps it.
    """

    is_taken = True
    """Nothing of it is still to be asked for when another layer's backward begins."""

    def __init__(
        self,
        layer: nn.Module,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        plan: LayerPlan,
        proofs: Proofs,
        fetch: Callable[[TiledRecord], None],
        name: str = "",
        fingerprint: Callable[[Tensor], Fingerprint] = Fingerprint,
    ) -> None:
        """Prepares one forward.

        Args:
            layer: the layer.
            forward: its own.
            args, kwargs: what it is called with; its input [batch, tokens, ...] is the first tensor that is
                of floating point.
            plan: what is kept of it, and how many rows a tile has.
            proofs: what is known of such layers.
            fetch: brings items back that were stored.
            name: of the layer, for errors.
            fingerprint: makes what results of tiles are compared by when they are computed again.

        Raises:
            ConfigError: the layer's input has no tokens, another argument needs gradients, or the layer is
                not row-local.
        """
        found = [*args, *kwargs.values()]
        found = [one for one in found if isinstance(one, Tensor) and one.is_floating_point()]
        if not found or found[0].ndim < 3:
            raise refuse(layer, "is given no hidden states [batch, tokens, width]")
        self.items: list[Item] = []
        self._source: Tensor | None = found[0]
        self._layer, self._plan, self._fetch = layer, plan, fetch
        self._arguments = TileArguments(args, kwargs, found[0])
        if any(one.requires_grad for one in self._arguments.tensors()):
            raise refuse(layer, "has an argument beside its input that needs a gradient")
        self._parts = SplitLayer(layer, forward)
        proofs.apply(self._parts, self._arguments, found[0])
        self._attention: KeptAttention | None = None
        batch, self._num_tokens = found[0].shape[:2]
        self._tile_tokens = max(1, plan.tile_rows // batch)
        self._name = name or type(layer).__name__
        self._fingerprint, self._fingerprints = fingerprint, dict[tuple[str, int], Fingerprint]()
        self._state = LayerState(layer, found[0])

    def run(self) -> Any:
        """Runs the layer's forward; its result needs gradients as the layer's does."""
        source = self._source
        assert source is not None
        parameters = [one for one in self._layer.parameters() if one.requires_grad]
        # The graph holds the record in place of the input, and lets go of it when autograd frees its tensors.
        with saved_tensors_hooks(lambda _: self, lambda record: record.input()):
            out = _Tiled.apply(weakref.ref(self), source, *parameters)
        self._source = None
        return out if self._rest is None else (out, *self._rest)

    def input(self) -> Tensor:
        """The layer's input, back from where it was stored.

        Raises:
            RuntimeError: it was changed in place since.
        """
        self._fetch(self)
        for item in self.items:
            item.check_unchanged()
        (kept,) = self.items[0].tensors
        return kept

    def forward(self, source: Tensor) -> Tensor:
        """The layer's result, and items."""
        heads, attention = self._heads(source, self._remember)
        answer = self._attend(heads, attention)
        self._remember("attention", 0, answer)
        del heads, attention
        out: Tensor | None = None
        for start, stop in self._tiles():
            tile = self._arguments.tile(source[:, start:stop], start)
            rows, self._rest = self._parts.after(tile, answer[:, start:stop])
            if out is None:
                out = rows.new_empty(rows.shape[0], self._num_tokens, *rows.shape[2:])
            self._remember("result", start, rows)
            out[:, start:stop] = rows
        if self._state.drawn:
            raise refuse(
                self._layer, "draws random numbers (dropout), which tiles would draw otherwise"
            )
        self._state.finish()
        kept = [] if self._attention is None else [self._attention.item]
        self.items = [Item.of(INPUT, [source]), *kept]
        assert out is not None
        return out

    def backward(
        self, source: Tensor, grad_out: Tensor
    ) -> tuple[Tensor | None, list[Tensor | None]]:
        """Gradients of the input and of the parameters that need one.

        Args:
            source: the layer's input.
            grad_out: gradient of the result.
        """
        return self._state.run(lambda: self._backward(source, grad_out))

    @torch.no_grad()
    def _backward(
        self, source: Tensor, grad_out: Tensor
    ) -> tuple[Tensor | None, list[Tensor | None]]:
        with _leaves(self._layer) as leaves:
            answer, backward = self._again(source)
            grad_source = torch.zeros_like(source) if source.requires_grad else None
            grad_answer = self._backward_after(source, answer, grad_out, grad_source)
            grad_heads = backward(grad_answer)
            del answer, backward, grad_answer
            self._backward_before(source, grad_heads, grad_source)
        return grad_source, [leaf.grad for leaf in leaves]

    def _remember(self, part: str, start: int, tensor: Tensor) -> None:
        """Notes what a part gives from a row on."""
        self._fingerprints[part, start] = self._fingerprint(tensor)

    def _compare(self, part: str, start: int, tensor: Tensor) -> None:
        """Refuses what differs from what a part gave at first."""
        if not self._fingerprints[part, start].matches(tensor, is_exact=False):
            raise other_values(
                self._name, f"{part} of tokens from {start:,} on", self._state.suspects()
            )

    def _tiles(self) -> Iterator[tuple[int, int]]:
        for start in range(0, self._num_tokens, self._tile_tokens):
            yield start, min(start + self._tile_tokens, self._num_tokens)

    def _heads(
        self, source: Tensor, check: Callable[[str, int, Tensor], None]
    ) -> tuple[Heads, AttentionCall]:
        """Whole queries, keys and values, and the attention that is called with them.

        Args:
            source: the layer's input.
            check: is given each tile of these, with its part's name and first token.
        """
        whole: list[Tensor] = []
        attention: AttentionCall | None = None
        for start, stop in self._tiles():
            tile = self._arguments.tile(source[:, start:stop], start)
            heads, attention = self._parts.before(tile)
            if not whole:
                whole = [_empty_heads(one, self._num_tokens) for one in heads]
            for name, one, rows in zip(_HEADS, whole, heads, strict=True):
                check(name, start, rows)
                one[:, :, start:stop] = rows
        assert attention is not None
        return tuple(whole), attention  # type: ignore[return-value]

    def _attend(self, heads: Heads, attention: AttentionCall) -> Tensor:
        outside = {address(one) for one in self._arguments.tensors()}
        kept, answer = KeptAttention.run(heads, attention, self._plan, outside)
        if answer.shape[:2] != (heads[0].shape[0], self._num_tokens):
            raise refuse(self._layer, f"has an attention that returns {list(answer.shape)}")
        self._attention = kept
        return answer

    def _again(self, source: Tensor) -> tuple[Tensor, Callable[[Tensor], Heads]]:
        """Attention's result, kept or computed again, and its backward."""
        kept = self._attention
        if kept is not None:

            def backward_kept(grad: Tensor) -> Heads:
                with torch.no_grad():
                    heads, _ = self._heads(source, self._compare)
                return kept.backward(heads, grad)

            return kept.item.tensors[0], backward_kept
        with torch.no_grad():
            heads, attention = self._heads(source, self._compare)
        for one in heads:
            one.requires_grad_()
        with torch.enable_grad():
            answer, _ = attention(*heads)
        self._compare("attention", 0, answer)

        def backward(grad: Tensor) -> Heads:
            # Not only to the heads: attention may have parameters.
            torch.autograd.backward(answer, grad)
            query, key, value = (one.grad for one in heads)
            assert query is not None
            assert key is not None
            assert value is not None
            return query, key, value

        return answer.detach(), backward

    def _backward_after(
        self, source: Tensor, answer: Tensor, grad_out: Tensor, grad_source: Tensor | None
    ) -> Tensor:
        """Adds to the input's gradient what comes through the part after attention; returns attention's."""
        grad_answer = torch.empty_like(answer)
        for start, stop in self._tiles():
            rows = _leaf(source[:, start:stop], grad_source is not None)
            answered = _leaf(answer[:, start:stop], True)
            with torch.enable_grad():
                out, _ = self._parts.after(self._arguments.tile(rows, start), answered)
            self._compare("result", start, out)
            torch.autograd.backward(out, grad_out[:, start:stop])
            grad_answer[:, start:stop] = 0 if answered.grad is None else answered.grad
            if grad_source is not None and rows.grad is not None:
                grad_source[:, start:stop] += rows.grad
        return grad_answer

    def _backward_before(self, source: Tensor, grads: Heads, grad_source: Tensor | None) -> None:
        """Adds to the input's gradient what comes through the part before attention."""
        for start, stop in self._tiles():
            rows = _leaf(source[:, start:stop], grad_source is not None)
            with torch.enable_grad():
                heads, _ = self._parts.before(self._arguments.tile(rows, start))
            pairs = [
                (one, grad[:, :, start:stop])
                for one, grad in zip(heads, grads, strict=True)
                if one.requires_grad
            ]
            if pairs:
                torch.autograd.backward(*map(list, zip(*pairs, strict=True)))  # type: ignore[arg-type]
            if grad_source is not None and rows.grad is not None:
                grad_source[:, start:stop] += rows.grad


_HEADS = ("query", "key", "value")


class _Tiled(torch.autograd.Function):
    """A layer as one node of autograd's graph."""

    @staticmethod
    def forward(ctx: Any, record: weakref.ref[TiledRecord], source: Tensor, *_: Tensor) -> Tensor:
        ctx.record = record
        ctx.save_for_backward(source)
        ctx.needs_source = source.requires_grad
        found = record()
        assert found is not None
        return found.forward(source.detach())

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> Any:  # type: ignore[override]
        refuse_differentiation()
        (kept,) = ctx.saved_tensors  # autograd's own error where these were freed
        record = ctx.record()
        source = kept.detach().requires_grad_(ctx.needs_source)
        grad_source, grads = record.backward(source, grad_out)
        return None, grad_source, *grads


@contextmanager
def _leaves(layer: nn.Module) -> Iterator[list[nn.Parameter]]:
    """Puts leaves in the place of a layer's parameters, so that gradients of tiles add up there.

    Hooks on the parameters, as those of DDP, then see the sum, once.

    Yields:
        The leaves of parameters that need gradients, in the order of `layer.parameters()`.
    """
    own = {
        (module, name): parameter
        for module in layer.modules()
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False)
    }
    made = {
        one: nn.Parameter(one.detach(), requires_grad=one.requires_grad) for one in own.values()
    }
    try:
        for (module, name), parameter in own.items():
            setattr(module, name, made[parameter])
        yield [made[one] for one in dict.fromkeys(own.values()) if one.requires_grad]
    finally:
        for (module, name), parameter in own.items():
            setattr(module, name, parameter)


def _leaf(tensor: Tensor, needs_gradient: bool) -> Tensor:
    return tensor.detach().requires_grad_(needs_gradient)


def _empty_heads(rows: Tensor, num_tokens: int) -> Tensor:
    """Memory for all tokens of what a tile has some of, tokens of one head beside its other heads."""
    batch, num_heads, _, width = rows.shape
    return rows.new_empty(batch, num_tokens, num_heads, width).transpose(1, 2)
