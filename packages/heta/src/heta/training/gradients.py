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
        num_bytes: their bytes.
        is_first: whether this rank is the first that holds it.
        is_summed: whether its gradient is summed. A buffer has none; those behind the last merge are
            computed alike by all parts, and summed over replicas only.
        is_counted: whether this rank's gradient enters the sum.
    """

    tensor: Tensor | None
    size: int
    num_bytes: int
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
        described = {
            name: [list(t.shape), str(t.dtype), name in parameters] for name, t in own.items()
        }
        holders = _gather_json(self._group, described)
        # Ranks list names in one order, though each leaves out what it does not hold.
        for name in sorted({name for held in holders for name in held}):
            ranks = [rank for rank, held in enumerate(holders) if name in held]
            kinds = {json.dumps(holders[rank][name]) for rank in ranks}
            if len(kinds) > 1:
                raise ConfigError(
                    f"parameter {name}: expected one shape and type on ranks {ranks}, got "
                    f"{sorted(kinds)}; make the same model on every rank"
                )
            if len(ranks) == 1:
                continue
            shape, dtype, is_parameter = holders[ranks[0]][name]
            is_behind_merge = name in replicated
            self._entries.append(
                _Entry(
                    own.get(name),
                    prod(shape),
                    prod(shape) * getattr(torch, dtype.removeprefix("torch.")).itemsize,
                    self._group.rank == ranks[0],
                    is_parameter and not (is_behind_merge and num_replicas == 1),
                    not (is_behind_merge and part.index > 0),
                )
            )

    def share_initial_values(self) -> None:
        """Gives every holder the values of the first, so that all begin alike."""
        if self._group is None or not self._entries:
            return
        # Bytes of one rank and zeros of the others: the sum is exact, whatever the type.
        values = [
            entry.tensor.detach().cpu().flatten().view(torch.uint8)
            if entry.is_first and entry.tensor is not None
            else torch.zeros(entry.num_bytes, dtype=torch.uint8)
            for entry in self._entries
        ]
        total = all_reduce(self._group, torch.cat(values))
        with torch.no_grad():
            sizes = [entry.num_bytes for entry in self._entries]
            for entry, value in zip(self._entries, total.split(sizes), strict=True):
                if entry.tensor is not None:
                    shared = value.clone().view(entry.tensor.dtype)
                    entry.tensor.copy_(shared.view_as(entry.tensor))

    def sum_gradients(self) -> None:
        """Replaces gradients by their sums; every rank calls it after its backward pass.

        A parameter without a gradient on any rank keeps none, as optimizers tell that from zeros.
        """
        entries = [entry for entry in self._entries if entry.is_summed]
        if self._group is None or not entries:
            return
        grads = [
            None if entry.tensor is None or not entry.is_counted else entry.tensor.grad
            for entry in entries
        ]
        values = [
            torch.zeros(entry.size) if grad is None else grad.flatten().float().cpu()
            for entry, grad in zip(entries, grads, strict=True)
        ]
        has_grad = torch.tensor([float(grad is not None) for grad in grads])
        with self._group.ledger.phase("gradients"):
            total = all_reduce(self._group, torch.cat([*values, has_grad]))
        *sums, counts = total.split([*(entry.size for entry in entries), len(entries)])
        for entry, value, count in zip(entries, sums, counts, strict=True):
            if entry.tensor is not None and count > 0:
                entry.tensor.grad = value.view_as(entry.tensor).to(
                    entry.tensor.device, entry.tensor.dtype
                )


def _gather_json(group: Group, content: dict) -> list[dict]:
    """What each rank says, by rank."""
    data = torch.tensor(list(json.dumps(content).encode()), dtype=torch.uint8)
    return [json.loads(bytes(part.tolist())) for part in all_gather_v(group, data)]
