"""Sums gradients of the parameters that several ranks hold, in one message."""

from __future__ import annotations

import json
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from heta.graph.part import Part
from heta.nn.hetero_model import HeteroModel
from shared.comms import Group, all_gather_v, all_reduce
from shared.errors import ConfigError

__all__ = ["GradientSync"]


@dataclass(frozen=True, slots=True, eq=False)
class _Entry:
    """One tensor that several ranks hold.

    Attributes:
        tensor: this rank's; None if it holds none.
        size: number of values.
        is_first: whether this rank is the first that holds it.
        is_summed: whether its gradient is summed. A buffer has none; those behind the last merge are
            computed alike by all parts, and summed over replicas only.
        is_counted: whether this rank's gradient enters the sum.
    """

    tensor: Tensor | None
    size: int
    is_first: bool
    is_summed: bool
    is_counted: bool


class GradientSync:
    """The parameters of a model that more than one rank holds.

    A parameter of relations gets the sum over all ranks that hold it: parts that compute the relation
    for other nodes, and replicas that compute it for other seeds.

    Args:
        model: this rank's model.
        part: this rank's part.
        group: all ranks; None for a single process.

    Raises:
        ConfigError: ranks hold a parameter of one name in several shapes.
    """

    def __init__(self, model: HeteroModel, part: Part, group: Group | None) -> None:
        self._group = group if group is not None and group.world_size > 1 else None
        self._entries: list[_Entry] = []
        if self._group is None:
            return
        parameters = dict(model.named_parameters())
        own = {**parameters, **dict(model.named_buffers())}
        replicated, num_replicas = model.replicated, self._group.world_size // part.num_parts
        described = {name: [list(t.shape), name in parameters] for name, t in own.items()}
        holders = _gather_json(self._group, described)
        # Ranks list names in one order, though each leaves out what it does not hold.
        for name in sorted({name for held in holders for name in held}):
            ranks = [rank for rank, held in enumerate(holders) if name in held]
            kinds = {json.dumps(holders[rank][name]) for rank in ranks}
            if len(kinds) > 1:
                raise ConfigError(
                    f"parameter {name}: expected one shape on ranks {ranks}, got {sorted(kinds)}; make "
                    f"the same model on every rank"
                )
            if len(ranks) == 1:
                continue
            shape, is_parameter = holders[ranks[0]][name]
            is_behind_merge = name in replicated
            self._entries.append(
                _Entry(
                    own.get(name),
                    prod(shape),
                    self._group.rank == ranks[0],
                    is_parameter and not (is_behind_merge and num_replicas == 1),
                    not (is_behind_merge and part.index > 0),
                )
            )

    @property
    def num_summed(self) -> int:
        """Number of values that a step sums over the ranks."""
        return sum(entry.size for entry in self._entries if entry.is_summed)

    def share_initial_values(self) -> None:
        """Gives every holder the values of the first, so that all begin alike."""
        if self._group is None or not self._entries:
            return
        values = [
            entry.tensor.detach().flatten().float().cpu()
            if entry.is_first and entry.tensor is not None
            else torch.zeros(entry.size)
            for entry in self._entries
        ]
        total = all_reduce(self._group, torch.cat(values))
        with torch.no_grad():
            sizes = [entry.size for entry in self._entries]
            for entry, value in zip(self._entries, total.split(sizes), strict=True):
                if entry.tensor is not None:
                    entry.tensor.copy_(value.view_as(entry.tensor))

    def sum_gradients(self) -> None:
        """Replaces gradients by their sums; every rank calls it after its backward pass."""
        entries = [entry for entry in self._entries if entry.is_summed]
        if self._group is None or not entries:
            return
        grads = [
            torch.zeros(entry.size)
            if entry.tensor is None or entry.tensor.grad is None or not entry.is_counted
            else entry.tensor.grad.flatten().float().cpu()
            for entry in entries
        ]
        with self._group.ledger.phase("gradients"):
            total = all_reduce(self._group, torch.cat(grads))
        for entry, value in zip(entries, total.split([e.size for e in entries]), strict=True):
            if entry.tensor is not None and entry.tensor.requires_grad:
                entry.tensor.grad = value.view_as(entry.tensor).to(entry.tensor)


def _gather_json(group: Group, content: dict) -> list[dict]:
    """What each rank says, by rank."""
    data = torch.tensor(list(json.dumps(content).encode()), dtype=torch.uint8)
    return [json.loads(bytes(part.tolist())) for part in all_gather_v(group, data)]
