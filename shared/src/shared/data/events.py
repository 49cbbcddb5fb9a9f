"""A list of timed events between two nodes each.

One type for everything that is read, inserted, drawn for replay or trained on. An event keeps its id
through all of it: its features are found by the id, and its random draws are keyed by it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from shared.data.node_ids import NodeIds
from shared.errors import DataError

__all__ = ["Events"]


@dataclass(frozen=True, slots=True, eq=False, init=False)
class Events:
    """Events, in any order; several may have one time, one id or the same two ends.

    Attributes:
        src: int64 [num_events], nodes from 0.
        dst: int64 [num_events].
        t: int64 or float64 [num_events], at least 0, all in one unit.
        eid: int64 [num_events], id of an event; its place in the list if not given.
        features: float32 [num_events, num_features], in the order of the list, or None; rows by id
            are `rows_by_id()`.
        label: where the events come from, in words.
        nodes: the user's own ids of the nodes; None where they are the numbers themselves.
    """

    src: Tensor
    dst: Tensor
    t: Tensor
    eid: Tensor
    features: Tensor | None
    label: str
    nodes: NodeIds | None

    def __init__(
        self,
        src: Any,
        dst: Any,
        t: Any,
        eid: Any = None,
        features: Any = None,
        label: str = "",
        nodes: NodeIds | None = None,
    ) -> None:
        """Takes tensors, arrays or lists; copies only what torch cannot use as it is.

        Raises:
            DataError: lengths differ, an id or a time is negative, an id is no whole number, a time
                or a feature is not finite.
        """
        fields: dict[str, Any] = {"src": _whole("src", src), "dst": _whole("dst", dst)}
        fields["t"] = _times(t)
        count = len(fields["src"])
        fields["eid"] = torch.arange(count) if eid is None else _whole("eid", eid)
        fields["features"] = None if features is None else _rows(features)
        for name, value in fields.items():
            if value is not None and len(value) != count:
                raise DataError(
                    f"events: expected one {name} for each src, got {len(value)} for {count}"
                )
        _set(self, **fields, label=label, nodes=nodes)

    def __len__(self) -> int:
        return len(self.src)

    def __getitem__(self, which: Any) -> Events:
        """The events of a slice, of positions or of a mask; a slice shares their memory.

        Raises:
            DataError: one position was given, whose event would not be a list.
        """
        if isinstance(which, int):
            raise DataError(f"events[{which}]: expected a slice, such as [{which}:{which + 1}]")
        if isinstance(which, np.ndarray):
            which = torch.from_numpy(which)
        features = None if self.features is None else self.features[which]
        tensors = {name: getattr(self, name)[which] for name in ("src", "dst", "t", "eid")}
        return _with(self, **tensors, features=features)

    @classmethod
    def concat(cls, parts: Sequence[Events]) -> Events:
        """Lists one after the other, of the same nodes.

        Raises:
            DataError: none, or they differ in the type of time or in their features' columns.
        """
        if not parts:
            raise DataError("concat: expected at least one list of events, got none")
        kinds = {(part.t.dtype, _width(part)) for part in parts}
        if len(kinds) > 1:
            told = "; ".join(sorted(f"{t} times with {width} features" for t, width in kinds))
            raise DataError(f"concat: expected lists of one kind, got {told}")
        names = ["src", "dst", "t", "eid"] + ["features"] * (parts[0].features is not None)
        joined = {name: torch.cat([getattr(part, name) for part in parts]) for name in names}
        label = parts[0].label if len({part.label for part in parts}) == 1 else ""
        return _with(parts[0], **joined, label=label)

    @property
    def num_nodes(self) -> int:
        """The number of nodes that have ids, else the largest node and one more; 0 without events."""
        if self.nodes is not None:
            return len(self.nodes)
        return int(max(self.src.max(), self.dst.max())) + 1 if len(self) else 0

    @property
    def is_sorted(self) -> bool:
        """Whether no event is earlier than the one before it."""
        return bool((self.t[1:] >= self.t[:-1]).all())

    def rows_by_id(self) -> Float[Tensor, "rows num_features"] | None:
        """The features as a store takes them: row `eid` belongs to that event, others are zeros.

        The features themselves where ids are 0, 1, 2 and on.

        Raises:
            DataError: ids are so sparse that rows would be mostly zeros.
        """
        if self.features is None or not len(self):
            return self.features
        num_rows = int(self.eid.max()) + 1
        if num_rows == len(self) and torch.equal(self.eid, torch.arange(num_rows)):
            return self.features
        if num_rows > 4 * len(self) + 1000:
            raise DataError(
                f"features: expected ids of about {len(self)} events to lie close together, got ids "
                f"up to {num_rows - 1}; give events without ids, which are numbered in their order"
            )
        rows = self.features.new_zeros(num_rows, self.features.shape[1])
        rows[self.eid] = self.features
        return rows

    def sorted(self) -> Events:
        """By time; events of one time stay in their order. Returns itself if it is sorted already."""
        return self if self.is_sorted else self[self.t.argsort(stable=True)]

    def digest(self) -> str:
        """SHA-256 of all columns, in hexadecimal: tells whether two lists are the same."""
        found = hashlib.sha256(f"{self.t.dtype} {_width(self)}".encode())
        for tensor in (self.src, self.dst, self.t, self.eid, self.features):
            if tensor is not None:
                found.update(tensor.contiguous().numpy().data)
        return found.hexdigest()


def _set(events: Events, **fields: Any) -> Events:
    for name, value in fields.items():
        object.__setattr__(events, name, value)
    return events


def _with(events: Events, **changes: Any) -> Events:
    kept = {name: getattr(events, name) for name in Events.__slots__}
    return _set(object.__new__(Events), **(kept | changes))


def _width(events: Events) -> int:
    return 0 if events.features is None else events.features.shape[1]


def _tensor(name: str, values: Any, dims: int) -> Tensor:
    try:
        tensor = values if isinstance(values, Tensor) else _as_tensor(np.asarray(values))
    except (TypeError, ValueError) as error:
        raise DataError(f"{name}: expected numbers, {error}; convert them first") from error
    if tensor.is_complex():
        raise DataError(f"{name}: expected real numbers, got {tensor.dtype}; give the real parts")
    if tensor.ndim != dims:
        shape = "one number" if dims == 1 else "one row of numbers"
        raise DataError(f"{name}: expected {shape} an event, got shape {list(tensor.shape)}")
    return tensor.detach().cpu()


def _as_tensor(array: np.ndarray) -> Tensor:
    # Torch takes no array that runs backwards, and warns of those that are read-only.
    is_usable = array.flags.writeable and all(step >= 0 for step in array.strides)
    return torch.from_numpy(array if is_usable else array.copy())


def _whole(name: str, values: Any) -> Tensor:
    tensor = _tensor(name, values, 1)
    if not len(tensor):
        return tensor.to(torch.int64)
    if tensor.is_floating_point() or tensor.dtype == torch.bool:
        raise DataError(f"{name}: expected whole numbers, got {tensor.dtype}")
    is_unsigned = tensor.dtype == torch.uint64
    tensor = tensor.to(torch.int64)
    if (tensor < 0).any():
        row = int((tensor < 0).nonzero()[0])
        if is_unsigned:
            raise DataError(
                f"{name} of event {row}: expected less than 2^63, got {int(tensor[row]) + 2**64}; "
                "number the nodes from 0, as pandas.factorize does"
            )
        raise DataError(f"{name} of event {row}: expected 0 or more, got {int(tensor[row])}")
    return tensor


def _times(values: Any) -> Tensor:
    tensor = _tensor("t", values, 1)
    if tensor.dtype == torch.bool:
        raise DataError(f"t: expected numbers, got {tensor.dtype}")
    tensor = tensor.to(torch.float64 if tensor.is_floating_point() else torch.int64)
    is_time = torch.isfinite(tensor) & (tensor >= 0)
    if not is_time.all():
        row = int((~is_time).nonzero()[0])
        raise DataError(
            f"t of event {row}: expected a finite time of at least 0, got {tensor[row].item()}; "
            "count from an earlier moment if times before 0 are meant"
        )
    return tensor


def _rows(values: Any) -> Tensor:
    tensor = _tensor("features", values, 2).to(torch.float32)
    if not torch.isfinite(tensor).all():
        row, column = (~torch.isfinite(tensor)).nonzero()[0].tolist()
        raise DataError(
            f"features of event {row}, column {column}: expected a finite number, "
            f"got {float(tensor[row, column])}"
        )
    return tensor
