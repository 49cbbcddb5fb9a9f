"""A model of a module for each layer and relation, of which a part holds those that it computes.

A type's rows are what its relations' modules give, combined and activated. The seeds' rows are
combined over all parts by an exchange; the rows of the frontier are computed where they are needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import reduce
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.func import functional_call

from heta.combine import Mean, Merge, Sum, choose_merge
from heta.graph.edges import RelationEdges
from heta.graph.part import Part
from heta.graph.sampler import Batch, LayerBlock
from heta.graph.schema import Relation, list_active_relations
from heta.nn.registration import (
    Registered,
    check_functions,
    give_shapes,
    make_head,
    register_modules,
)
from heta.nn.relation_input import RelationInput
from shared.errors import ConfigError

__all__ = ["HeteroModel", "LocalExchange", "MergeExchange"]

Conv = Callable[[int, Relation, int, int, int], nn.Module]
Call = Callable[..., Tensor]


@runtime_checkable
class MergeExchange(Protocol):
    """How the parts' states of the seeds become one."""

    def merge(self, number: int, merge: Merge, state: Any, previous: Tensor | None) -> Any:
        """Returns the merged state of layer `number`; `previous` is the seeds' rows below it."""
        ...

    def share_gradient(self, number: int, rows: Tensor) -> Tensor:
        """Returns the merged rows of a lower layer, whose gradient is the sum over parts."""
        ...

    def same_random(self, number: int) -> Any:
        """A context in which all parts draw the same random numbers."""
        ...


class LocalExchange:
    """The exchange of a single part: nothing to merge."""

    def begin(self, epoch: int, step: int) -> None:
        """Begins a step."""

    def check(self) -> None:
        """Compares nothing."""

    def merge(self, number: int, merge: Merge, state: Any, previous: Tensor | None) -> Any:
        """Returns the state."""
        return state

    def share_gradient(self, number: int, rows: Tensor) -> Tensor:
        """Returns the rows."""
        return rows

    @contextmanager
    def same_random(self, number: int) -> Iterator[None]:
        """Draws as usual."""
        yield


class HeteroModel(nn.Module):
    """Modules by layer and relation over one part of a graph, and a head on the seeds' last rows.

    Modules are made for all relations in the schema's order, whatever the part, and those of other
    parts are dropped: with the same `torch.manual_seed` every part starts as one process would, and
    names of parameters do not depend on the number of parts.

    Args:
        part: the part.
        conv: makes the module of a relation: `conv(layer, relation, src_dim, dst_dim, out_dim)`, with
            layers from 1. It is called as `module((x_src, x_dst), edge_index)`, as PyG's convolutions
            are, and returns a row for each destination; for "softmax", logits and values for each
            edge. A module may serve several relations.
        hidden: width of every layer's rows.
        layers: number of layers.
        head: what makes logits of the seeds' rows; a number stands for a linear layer of so many
            classes.
        combine: a name of `heta.combine.MERGES`, or an object of one of its classes.
        activation: applied to the combined rows of all layers but the last.
        uses_dst: whether modules read the destination's own row. Without, `dst_dim` and the width of
            `x_dst` are 0, and parts exchange once a step instead of once a layer.
        self_term: makes a module of the destination's own row, called as `module(x_dst)` and combined
            like one relation more: `self_term(layer, node_type, in_dim, out_dim)`.

    Raises:
        ConfigError: layers or `uses_dst` are not those of the plan, two modules share a parameter,
            a module's parameters have no shape yet, or the plan has a `head_dim` and the head is not
            one linear layer of so many outputs on summed or averaged rows.
    """

    def __init__(
        self,
        part: Part,
        conv: Conv,
        hidden: int,
        layers: int,
        head: nn.Module | int,
        combine: str | Merge | Callable[..., Any] = "sum",
        activation: Callable[[Tensor], Tensor] = torch.relu,
        uses_dst: bool = True,
        self_term: Callable[[int, str, int, int], nn.Module] | None = None,
    ) -> None:
        super().__init__()
        self.merge = choose_merge(combine)
        self.activation, self.uses_dst, self.num_layers = activation, uses_dst, layers
        self.hidden, self.schema = hidden, part.schema
        self.made_for = (part.fingerprint, part.index)
        _check_plan(part, hidden, layers, uses_dst, self_term is not None)
        self.active = list_active_relations(part.schema, layers, uses_dst)
        self.has_self_term = self_term is not None
        self.dims = self._list_dims(part)
        head = make_head(head, self.dims[-1][part.schema.target])
        if part.head_dim is not None and part.strategy == "raf":
            self._check_head(head, part.head_dim)
        # The head of a sum is the sum of heads, so the narrower of rows and logits is merged.
        self._merges_logits = (
            part.num_parts > 1 and part.head_dim is not None and part.head_dim < hidden
        )
        self._roots = frozenset(part.roots)
        makers = self._list_makers(conv, self_term)
        needed = {key for key in makers if self._is_needed(part, *key)}
        self.stack_function = getattr(self.merge, "function", None)
        check_functions(head, self.activation, self.stack_function)
        registered = register_modules(makers, needed, head)
        self.convs, self.head = registered.modules, head
        self._registered: Registered = registered
        # Rows that no part holds are computed by the parts in turn, as a cut relation's are.
        self._self_share = (part.index, part.num_parts)

    @property
    def module_of(self) -> Mapping[tuple[int, Any], nn.Module]:
        """This part's modules, by (layer, relation), or (layer, type) for own rows."""
        return self._registered.module_of

    @property
    def replicated(self) -> dict[str, nn.Parameter]:
        """Parameters behind the last merge: all parts compute them alike, gradients included."""
        is_before = {"weight"} if self._merges_logits else ()
        return {f"head.{n}": p for n, p in self.head.named_parameters() if n not in is_before}

    def _check_head(self, head: nn.Module, head_dim: int) -> None:
        """Refuses what may not be applied before the last merge."""
        is_linear = type(head) is nn.Linear and head.out_features == head_dim
        has_hooks = any(
            getattr(head, f"_{when}_hooks")
            for when in ("forward", "forward_pre", "backward", "backward_pre")
        )
        is_sum = type(self.merge) in (Sum, Mean) and type(self).finish is HeteroModel.finish
        if is_linear and is_sum and not has_hooks:
            return
        raise ConfigError(
            f"head: the plan's head_dim={head_dim} expects one torch.nn.Linear of {head_dim} outputs, "
            f"without hooks, on rows that are summed or averaged, got {head} on "
            f"{type(self.merge).__name__} in {type(self).__name__}; plan with head_dim=None"
        )

    def _list_dims(self, part: Part) -> list[dict[str, int]]:
        """Widths of each type's rows, of input rows first and then by layer."""
        dims = [{node_type: part.input_dim(node_type) for node_type in part.schema.types}]
        for number in range(1, self.num_layers + 1):
            dims.append(
                {
                    node_type: self.merge.out_dim(self.hidden, self.num_slots(number, node_type))
                    for node_type in part.schema.types
                    if self.num_slots(number, node_type)
                }
            )
        return dims

    def slots(self, number: int, node_type: str) -> dict[Relation | None, int]:
        """Numbers what is combined into a type's rows; None stands for the own row."""
        into = [r for r in self.schema.into(node_type) if r in self.active[number - 1]]
        keys = [*into, None] if self.has_self_term and into else into
        return {key: slot for slot, key in enumerate(keys)}

    def num_slots(self, number: int, node_type: str) -> int:
        """Counts what is combined into a type's rows."""
        return len(self.slots(number, node_type))

    def _list_makers(
        self, conv: Conv, self_term: Any
    ) -> dict[tuple[int, Any], Callable[[], nn.Module]]:
        """What makes each module, by (layer, relation), or (layer, type) for own rows; in one order."""
        makers: dict[tuple[int, Any], Callable[[], nn.Module]] = {}
        for number in range(1, self.num_layers + 1):
            below = self.dims[number - 1]
            for relation in self.schema.relations:
                if relation not in self.active[number - 1]:
                    continue
                src_dim = below[relation[0]]
                dst_dim = below[relation[2]] if self.uses_dst else 0
                arguments = (number, relation, src_dim, dst_dim, self.hidden)
                makers[number, relation] = lambda a=arguments: give_shapes(conv(*a), *a[2:4])
            for node_type in self.schema.types if self_term else ():
                if self.num_slots(number, node_type):
                    own = (number, node_type, below[node_type], self.hidden)
                    makers[number, node_type] = lambda a=own: self_term(*a)
        return makers

    def _is_needed(self, part: Part, number: int, key: Relation | str) -> bool:
        """Whether this part computes a module: for the seeds, or for its frontier."""
        is_own = isinstance(key, str)
        computes_seeds = self.uses_dst or number == self.num_layers
        if computes_seeds and (key == part.schema.target if is_own else key in part.roots):
            return True
        if computes_seeds and key == self._stand_in(number):
            return True
        first = 1 if self.uses_dst else self.num_layers - number
        below = [h for h in range(first, self.num_layers - number + 1) if h >= 1]
        hops = frozenset().union(*(part.relations[h] for h in below))
        return any(relation[2] == key for relation in hops) if is_own else key in hops

    def _stand_in(self, number: int) -> Relation | None:
        """The relation whose module gives the merge's identity where no root of this part is active."""
        active = [r for r in self.schema.roots if r in self.active[number - 1]]
        if self.has_self_term or any(r in self._roots for r in active):
            return None
        return active[0]

    def module(self, number: int, key: Relation | str) -> nn.Module:
        """Returns the module of a layer and relation, or of a type's own rows."""
        return self._registered.module_of[number, key]

    def forward(
        self,
        batch: Batch,
        inputs: Mapping[str, Tensor],
        seed_rows: Tensor | None = None,
        exchange: MergeExchange | None = None,
    ) -> Tensor:
        """Computes the seeds' logits.

        Args:
            batch: what was sampled.
            inputs: input rows of the batch's `inputs`, by type.
            seed_rows: input rows of the seeds; needed if modules read the destination's row.
            exchange: merges the parts' states; None for a single part.

        Returns:
            Logits [seeds, classes].

        Raises:
            ConfigError: the plan has several parts, and there is no exchange.
        """
        if exchange is None and self._self_share[1] > 1:
            raise ConfigError(
                f"expected an exchange that merges the {self._self_share[1]} parts of the plan, got none; "
                f"use heta.Trainer, or a plan for one part"
            )
        exchange = exchange or LocalExchange()
        rows, seeds = self.embed(batch, dict(inputs), seed_rows if self.uses_dst else None)
        for layer in batch.layers:
            sources = self.project_sources(layer.number, rows)
            above = {t: self._frontier_rows(layer, t, rows, sources) for t in layer.nodes}
            if self.uses_dst or layer.number == self.num_layers:
                seeds = self._seed_rows(layer, batch, sources, seeds, exchange)
            rows = above
        assert seeds is not None, "the last layer computes them"
        if self._merges_logits:
            return seeds
        with exchange.same_random(0):
            return self.head(seeds)

    def embed(
        self, batch: Batch, inputs: dict[str, Tensor], seeds: Tensor | None
    ) -> tuple[dict[str, Tensor], Tensor | None]:
        """Maps input rows to the rows below layer 1; here they are the same."""
        return inputs, seeds

    def project_sources(self, number: int, rows: dict[str, Tensor]) -> dict[str, Tensor]:
        """Maps each type's rows to what the modules get as `x_src`; here they are the same."""
        return rows

    def project_destinations(self, number: int, node_type: str, rows: Tensor) -> Tensor:
        """Maps a type's rows to what the modules get as `x_dst`; here they are the same."""
        return rows

    def finish(
        self, number: int, node_type: str, combined: Tensor, own: Tensor, call: Call
    ) -> Tensor:
        """Makes a type's rows of the combined ones: activates them in all layers but the last.

        Args:
            number: the layer.
            node_type: the type.
            combined: what the merge gave.
            own: the same nodes' rows below this layer; of width 0 if modules do not read them.
            call: calls a module. All parts compute the seeds' rows, so that its parameters'
                gradients are counted once only if the module is called by this.
        """
        return combined if number == self.num_layers else call(self.activation, combined)

    def _frontier_rows(
        self,
        layer: LayerBlock,
        node_type: str,
        rows: Mapping[str, Tensor],
        sources: Mapping[str, Tensor],
    ) -> Tensor:
        number, num_rows = layer.number, len(layer.nodes[node_type])
        slots = self.slots(number, node_type)
        own = self._own_rows(rows.get(node_type), num_rows)
        x_dst = self.project_destinations(number, node_type, own)
        inputs = [
            RelationInput(
                r, slots[r], self.module(number, r), sources[r[0]], x_dst, layer.edges[r], None
            )
            for r in layer.edges
            if r[2] == node_type
        ]
        if None in slots:
            module = self.module(number, node_type)
            inputs.append(RelationInput(None, slots[None], module, own, own, None, None))
        state = self.combine_relations(inputs, num_rows, len(slots))
        combined = self._finalize(state, len(slots), _call)
        return self.finish(number, node_type, combined, own, _call)

    def _seed_rows(
        self,
        layer: LayerBlock,
        batch: Batch,
        sources: Mapping[str, Tensor],
        seeds: Tensor | None,
        exchange: MergeExchange,
    ) -> Tensor:
        target, number, num_rows = self.schema.target, layer.number, len(batch.seeds)
        slots = self.slots(number, target)
        own = self._own_rows(seeds, num_rows)
        x_dst = self.project_destinations(number, target, own)
        inputs = []
        for relation, part in layer.seed_edges.items():
            chosen = None if len(part.rows) == num_rows else part.rows
            x_chosen = x_dst if chosen is None else x_dst[chosen]
            module = self.module(number, relation)
            inputs.append(
                RelationInput(
                    relation,
                    slots[relation],
                    module,
                    sources[relation[0]],
                    x_chosen,
                    part.edges,
                    chosen,
                )
            )
        index, num_parts = self._self_share
        if None in slots:
            chosen = None
            if num_parts > 1:
                chosen = (batch.seeds % num_parts == index).nonzero()[:, 0].to(own.device)
            own_rows = own if chosen is None else own[chosen]
            module = self.module(number, target)
            inputs.append(
                RelationInput(None, slots[None], module, own_rows, own_rows, None, chosen)
            )
        if not inputs:
            inputs.append(self._compute_nothing(number, x_dst))
        state = self.combine_relations(inputs, num_rows, len(slots))
        if self._merges_logits and number == self.num_layers:
            head: Any = self.head
            self._check_head(head, head.out_features)
            logits = exchange.merge(number, self.merge, state.flatten(1) @ head.weight.t(), seeds)
            logits = self._finalize(logits, len(slots), _call)
            return logits if head.bias is None else logits + head.bias
        merged = exchange.merge(number, self.merge, state, seeds)

        def call(function: Callable[..., Tensor], *arguments: Tensor) -> Tensor:
            # Every part computes this alike; the sum over parts of a share each is the gradient.
            if num_parts == 1 or not isinstance(function, nn.Module):
                return function(*arguments)
            scaled = {n: _scale(p, num_parts) for n, p in function.named_parameters()}
            return functional_call(function, scaled, arguments)

        with exchange.same_random(number):
            combined = self._finalize(merged, len(slots), call)
            own = _scale(own, num_parts) if num_parts > 1 else own
            finished = self.finish(number, target, combined, own, call)
        if number < self.num_layers:
            finished = exchange.share_gradient(number, finished)
        return finished

    def _compute_nothing(self, number: int, x_dst: Tensor) -> RelationInput:
        """A relation over no rows, so that a part without work joins the merge with its identity."""
        relation = self._stand_in(number)
        assert relation is not None, "this part has no active root"
        empty = x_dst.new_empty(0, self.dims[number - 1][relation[0]])
        x_src = self.project_sources(number, {relation[0]: empty})[relation[0]]
        none = torch.empty(0, dtype=torch.int64, device=x_dst.device)
        edges = RelationEdges(none.new_zeros(1), none, 0)
        slot, module = (
            self.slots(number, self.schema.target)[relation],
            self.module(number, relation),
        )
        return RelationInput(relation, slot, module, x_src, x_dst[:0], edges, none)

    def _finalize(self, state: Any, num_slots: int, call: Call) -> Tensor:
        if self.stack_function is not None:
            return call(self.stack_function, state).flatten(1)
        return self.merge.finalize(state, num_slots).flatten(1)

    def combine_relations(self, inputs: list[RelationInput], num_rows: int, num_slots: int) -> Any:
        """Runs the modules of some relations into a type, and merges what they return.

        Args:
            inputs: the relations that this part computes, at least one.
            num_rows: destination rows.
            num_slots: relations into the type, over all parts.

        Returns:
            The state, of all destination rows.
        """
        states = [
            self.merge.lift(*each.call(self.merge, self.hidden), num_rows, each.slot, num_slots)
            for each in inputs
        ]
        return reduce(self.merge.merge, states)

    def _own_rows(self, rows: Tensor | None, num_rows: int) -> Tensor:
        if self.uses_dst:
            assert rows is not None, "rows of destinations come first in each list"
            return rows[:num_rows]
        return torch.empty(num_rows, 0, device=next(self.parameters()).device)


def _call(function: Callable[..., Tensor], *arguments: Tensor) -> Tensor:
    return function(*arguments)


def _scale(tensor: Tensor, count: int) -> Tensor:
    return _ScaleGradient.apply(tensor, count)


class _ScaleGradient(torch.autograd.Function):
    """Gives the tensor; its gradient is divided by a count."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, count: int) -> Tensor:
        ctx.count = count
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyrefly: ignore
        return grad / ctx.count, None


def _check_plan(part: Part, hidden: int, layers: int, uses_dst: bool, has_self_term: bool) -> None:
    if layers != part.layers or uses_dst != part.uses_dst:
        raise ConfigError(
            f"expected a model of the plan's {part.layers} layers with uses_dst={part.uses_dst}, got "
            f"{layers} layers with uses_dst={uses_dst}; change the model, or plan for it"
        )
    if hidden < 1:
        raise ConfigError(f"hidden: expected 1 or more, got {hidden}")
    if has_self_term and not uses_dst:
        raise ConfigError(
            "self_term: expected uses_dst=True, as it reads the destination's own row"
        )
