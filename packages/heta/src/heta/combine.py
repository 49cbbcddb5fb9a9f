"""How the outputs of all relations into a node become its row, one part at a time.

Each way of combining is a commutative monoid over *states*: `lift` makes a state of one relation's
output, `merge` joins two states, and `finalize` gives the rows. Parts therefore merge what they
computed in any grouping, and the result is that of one process. Relation-aggregation-first training
(Heta, PVLDB 18(9)) rests on this. A user's own way derives from one of these classes.

A state is a tensor, or a tuple of tensors, whose first dimension counts the destination rows. The
states of relations that a part does not compute are the identity of the merge.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from torch.nn.functional import pad

from shared.errors import ConfigError
from shared.kernels.edge_softmax import SoftmaxState, softmax_state
from shared.registry import Registry

__all__ = [
    "MERGES",
    "Max",
    "Mean",
    "Merge",
    "Softmax",
    "SoftmaxState",
    "Stack",
    "Sum",
    "choose_merge",
]

_NO_SLOT = torch.iinfo(torch.int16).max


class Merge(ABC):
    """One way of combining relations.

    Attributes:
        takes_edges: whether a relation's module gives (logits [E, H], values [E, H, D]) for each
            edge, instead of a row for each destination.
    """

    takes_edges = False

    @abstractmethod
    def lift(self, *arguments: Any) -> Any:
        """Makes the state of one relation's output.

        Args:
            arguments: what the relation's module returned; then `row` [m], the destination of each
                output row (of each edge, if `takes_edges`), `num_rows`, `slot`, the relation's
                number among those into the type, and `num_slots`, how many there are.
        """

    @abstractmethod
    def merge(self, first: Any, second: Any) -> Any:
        """Joins two states of the same rows."""

    @abstractmethod
    def finalize(self, state: Any, num_slots: int = 1) -> Tensor:
        """Returns the rows [num_rows, ...] of a state that holds every relation."""

    @abstractmethod
    def route(self, local: Any, merged: Any) -> Any:
        """Returns the merged state with gradients that flow to this part's own state.

        Args:
            local: the state that this part lifted and merged, with its graph.
            merged: the merge of all parts' states, without a graph.
        """

    def out_dim(self, dim: int, num_slots: int) -> int:
        """Returns the width of the rows, given that of a relation's output."""
        return dim


class Sum(Merge):
    """The sum over relations, as in R-GCN."""

    def lift(  # pyrefly: ignore[bad-override]
        self,
        output: Float[Tensor, "m dim"],
        row: Int64[Tensor, " m"],
        num_rows: int,
        slot: int = 0,
        num_slots: int = 1,
    ) -> Float[Tensor, "num_rows dim"]:
        """Places the output rows; the others are 0."""
        return _place(output, row, num_rows, 0.0)

    def merge(self, first: Tensor, second: Tensor) -> Tensor:
        """Adds two states."""
        return first + second

    def finalize(self, state: Tensor, num_slots: int = 1) -> Tensor:
        """Returns the sums."""
        return state

    def route(self, local: Tensor, merged: Tensor) -> Tensor:
        """Passes each row's gradient on as it is."""
        return _Route.apply(local, merged, None)


class Mean(Sum):
    """The mean over all relations into the type, with and without edges, as PyG and DGL count."""

    def finalize(self, state: Tensor, num_slots: int = 1) -> Tensor:
        """Divides the sums by the number of relations."""
        return state / num_slots


class Stack(Sum):
    """Every relation's rows side by side; a function of one's own makes one row of them.

    Args:
        function: maps [num_rows, relations, dim] to [num_rows, ...]; it sees each row of all
            relations at once, and may be a module with parameters. None concatenates them to
            [num_rows, relations * dim].
        width: maps (dim, relations) to the width of the function's rows; needed beside `function`
            unless the width stays `dim`.
    """

    def __init__(
        self,
        function: Callable[[Tensor], Tensor] | None = None,
        width: Callable[[int, int], int] | None = None,
    ) -> None:
        self.function, self._width = function, width

    def lift(  # pyrefly: ignore[bad-override]
        self,
        output: Float[Tensor, "m dim"],
        row: Int64[Tensor, " m"],
        num_rows: int,
        slot: int = 0,
        num_slots: int = 1,
    ) -> Float[Tensor, "num_rows slots dim"]:
        """Places the output rows into the relation's slot; all else is 0."""
        rows = _place(output, row, num_rows, 0.0)[:, None]
        return pad(rows, (0, 0, slot, num_slots - slot - 1))

    def finalize(self, state: Tensor, num_slots: int = 1) -> Tensor:
        """Applies the function, or concatenates."""
        return state.flatten(1) if self.function is None else self.function(state)

    def out_dim(self, dim: int, num_slots: int) -> int:
        """Returns the width of the function's rows."""
        if self.function is None:
            return dim * num_slots
        return dim if self._width is None else self._width(dim, num_slots)


class MaxState(NamedTuple):
    """The largest values, and which relation gave them; of equal ones the first relation's count."""

    values: Tensor
    slots: Tensor


class Max(Merge):
    """The largest value over relations, element by element."""

    def lift(  # pyrefly: ignore[bad-override]
        self,
        output: Float[Tensor, "m dim"],
        row: Int64[Tensor, " m"],
        num_rows: int,
        slot: int = 0,
        num_slots: int = 1,
    ) -> MaxState:
        """Places the output rows; the others are minus infinity."""
        slots = torch.full_like(output, slot, dtype=torch.int16)
        return MaxState(
            _place(output, row, num_rows, -torch.inf), _place(slots, row, num_rows, _NO_SLOT)
        )

    def merge(self, first: MaxState, second: MaxState) -> MaxState:
        """Keeps the larger of each pair of values."""
        (a, slots_a), (b, slots_b) = first, second
        is_second = (b > a) | ((b == a) & (slots_b < slots_a))
        return MaxState(torch.where(is_second, b, a), torch.where(is_second, slots_b, slots_a))

    def finalize(self, state: MaxState, num_slots: int = 1) -> Tensor:
        """Returns the values."""
        return state.values

    def route(self, local: MaxState, merged: MaxState) -> MaxState:
        """Passes a value's gradient on to the part whose relation gave it."""
        is_ours = (local.slots == merged.slots).to(local.values.dtype)
        # A row of another part is minus infinity here, and its gradient 0.
        values = local.values.masked_fill(local.slots == _NO_SLOT, 0.0)
        return MaxState(_Route.apply(values, merged.values, is_ours), merged.slots)


class Softmax(Merge):
    """One softmax over all in-edges, of all relations, as in HGT and in a GAT over the union graph.

    States join as those of blockwise attention do: both are rescaled to the larger maximum. A row
    without edges is 0.
    """

    takes_edges = True

    def lift(  # pyrefly: ignore[bad-override]
        self,
        logits: Float[Tensor, "edges heads"],
        values: Float[Tensor, "edges heads dim"],
        row: Int64[Tensor, " edges"],
        num_rows: int,
        slot: int = 0,
        num_slots: int = 1,
    ) -> SoftmaxState:
        """Sums the edges of each row."""
        if len(row) and bool((row.diff() < 0).any()):
            order = row.argsort(stable=True)
            logits, values, row = logits[order], values[order], row[order]
        counts = torch.bincount(row, minlength=num_rows)
        indptr = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        return softmax_state(indptr, logits, values)

    def merge(self, first: SoftmaxState, second: SoftmaxState) -> SoftmaxState:
        """Rescales both to the larger maximum and adds."""
        maximum = torch.maximum(first.maximum, second.maximum).detach()
        a, b = _rescale(first.maximum, maximum), _rescale(second.maximum, maximum)
        return SoftmaxState(
            maximum,
            first.total * a + second.total * b,
            first.weighted * a[..., None] + second.weighted * b[..., None],
        )

    def finalize(self, state: SoftmaxState, num_slots: int = 1) -> Tensor:
        """Divides the weighted sums by the totals; returns [rows, heads, dim]."""
        total = torch.where(state.total > 0, state.total, torch.ones_like(state.total))
        return state.weighted / total[..., None]

    def route(self, local: SoftmaxState, merged: SoftmaxState) -> SoftmaxState:
        """Passes gradients on, scaled as this part's state was."""
        scale = _rescale(local.maximum, merged.maximum)
        return SoftmaxState(
            merged.maximum,
            _Route.apply(local.total, merged.total, scale),
            _Route.apply(local.weighted, merged.weighted, scale[..., None]),
        )


def _place(output: Tensor, row: Tensor, num_rows: int, identity: float) -> Tensor:
    """Puts the output rows at their destinations, and the merge's identity everywhere else."""
    if len(row) == num_rows and not bool((row.diff() < 1).any()):
        return output  # distinct and in order, so these are all of them
    return output.new_full((num_rows, *output.shape[1:]), identity).index_copy(0, row, output)


def _rescale(own: Tensor, maximum: Tensor) -> Tensor:
    """The factor e^(own - maximum); 0 where a side has no edges, whose maximum is minus infinity."""
    return torch.where(torch.isinf(own), 0.0, (own - maximum).exp()).detach()


class _Route(torch.autograd.Function):
    """Gives the merged tensor; its gradient, times a factor, is the local tensor's."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, merged: Tensor, factor: Tensor | None) -> Tensor:
        ctx.factor = factor
        return merged.view_as(merged)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # pyrefly: ignore
        return grad if ctx.factor is None else grad * ctx.factor, None, None


MERGES: Registry[str, type[Merge]] = Registry("merge")
MERGES.add("sum", Sum, "sum over relations")
MERGES.add("mean", Mean, "mean over all relations into the type")
MERGES.add("max", Max, "largest value over relations, element by element")
MERGES.add("softmax", Softmax, "one softmax over the edges of all relations")
MERGES.add("stack", Stack, "all relations side by side")


def choose_merge(combine: object) -> Merge:
    """Returns the merge of a name, or the one given.

    Raises:
        ConfigError: no merge has this name, or it is a function, of which nothing is known.
    """
    if isinstance(combine, Merge):
        return combine
    if not isinstance(combine, str):
        raise ConfigError(
            f"combine: expected one of {', '.join(MERGES)} or an object of a class in heta.combine, "
            f"got {combine!r}; a function need not give the same rows when parts are merged, so "
            f"pass heta.combine.Stack(function), which shows it all relations at once"
        )
    return MERGES.get(combine)()
