"""A list of events in order of time: source, destination, time and features."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int64, Shaped
from torch import Tensor

from shared.data.events import Events as Checked
from shared.data.node_ids import NodeIds
from shared.errors import DataError

__all__ = ["Events"]


@dataclass(frozen=True, slots=True, eq=False, init=False)
class Events:
    """Events by time; those of equal times in the order given.

    Attributes:
        src: int64 [num_events], source nodes, numbered from 0.
        dst: int64 [num_events], destination nodes.
        t: int64 or float64 [num_events], times, at least 0 and never decreasing.
        eid: int64 [num_events], index of an event by time in the whole list, and of its row in
            `features`.
        features: float32 [rows, edge_dim], indexed by `eid` and shared by slices; None for none.
        label: origin of the events.
        nodes: the user's own ids of the nodes; None where they are the numbers themselves.
    """

    src: Int64[Tensor, " num_events"]
    dst: Int64[Tensor, " num_events"]
    t: Shaped[Tensor, " num_events"]
    eid: Int64[Tensor, " num_events"]
    features: Float[Tensor, "rows edge_dim"] | None
    label: str
    nodes: NodeIds | None

    def __init__(
        self,
        src: Any,
        dst: Any,
        t: Any,
        features: Any = None,
        *,
        sort: bool = False,
        label: str = "",
        nodes: NodeIds | None = None,
    ) -> None:
        """Takes tensors, arrays or lists.

        Args:
            src, dst, t, features: see the attributes; one row of features per event.
            sort: sort the events by time, instead of refusing unsorted ones.
            label, nodes: see the attributes.

        Raises:
            DataError: lengths differ, an id or a time is negative or not a number, a feature is not
                finite, or an event is earlier than the one before it and `sort` is false.
        """
        src, dst, t = _copied(src), _copied(dst), _copied(t)
        given = Checked(src, dst, t, None, None if features is None else _copied(features))
        src, dst, t, rows = given.src, given.dst, given.t, given.features
        if not given.is_sorted:
            if not sort:
                late = int((t.diff() < 0).nonzero()[0]) + 1
                raise DataError(
                    f"events: expected times that never fall, event {late} is earlier than the one "
                    f"before it ({t[late].item()} after {t[late - 1].item()}); give sort=True"
                )
            order = t.argsort(stable=True)
            src, dst, t = src[order], dst[order], t[order]
            rows = None if rows is None else rows[order]
        self._set(src, dst, t, torch.arange(len(src)), rows, label, nodes)

    @classmethod
    def wrap(cls, events: Checked) -> Events:
        """Events of `shared.data` by time; their ids become positions in that order."""
        sort = events.sorted()
        return cls(
            sort.src, sort.dst, sort.t, sort.features, label=events.label, nodes=events.nodes
        )

    def _set(self, *values: Any) -> Events:
        for name, value in zip(self.__slots__, values, strict=True):
            object.__setattr__(self, name, value)
        return self

    def __len__(self) -> int:
        return len(self.src)

    def __getitem__(self, which: slice) -> Events:
        """The events of a slice; they share memory, and keep their ids.

        Raises:
            DataError: anything but a slice of step 1.
        """
        if not isinstance(which, slice) or which.step not in (None, 1):
            raise DataError(f"events[{which}]: expected a slice of step 1, such as [0:100]")
        cut = (getattr(self, name)[which] for name in ("src", "dst", "t", "eid"))
        return object.__new__(Events)._set(*cut, self.features, self.label, self.nodes)

    @property
    def num_nodes(self) -> int:
        """The number of nodes that have ids, else the largest node plus 1; 0 without events."""
        if self.nodes is not None:
            return len(self.nodes)
        return int(max(self.src.max(), self.dst.max())) + 1 if len(self) else 0

    @property
    def edge_dim(self) -> int:
        """Columns of features; 0 for none."""
        return 0 if self.features is None else self.features.shape[1]

    def digest(self) -> str:
        """SHA-256 of all columns, in hexadecimal: tells whether two lists are the same."""
        rows = None if self.features is None else self.features[self.eid]
        return Checked(self.src, self.dst, self.t, self.eid, rows).digest()

    def split(self, *shares: float) -> list[Events]:
        """Cuts by the number of events: `split(0.7, 0.15)` gives three parts, the last the rest.

        Raises:
            DataError: a share is negative, or their sum exceeds 1.
        """
        if not (all(share >= 0 for share in shares) and sum(shares) <= 1 + 1e-9):
            raise DataError(
                f"split: expected shares of 0 or more, at most 1 together, got {', '.join(map(str, shares))}"
            )
        ends = [round(len(self) * sum(shares[: at + 1])) for at in range(len(shares))]
        return [self[a:b] for a, b in zip([0, *ends], [*ends, len(self)], strict=True)]


def _copied(values: Any) -> Any:
    # Arrays are copied, as the caller may change them later; tensors are shared, as torch does.
    try:
        return values if isinstance(values, Tensor) else np.array(values)
    except ValueError:
        return values  # rows of different lengths, for which `Checked` raises
