"""A list of events in order of time: who met whom, when, and with what features."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int64, Shaped
from torch import Tensor

from shared.errors import DataError

__all__ = ["Events"]


@dataclass(frozen=True, slots=True, eq=False, init=False)
class Events:
    """Events by time; those of one time in the order given.

    Attributes:
        src: int64 [num_events], nodes from 0.
        dst: int64 [num_events].
        t: int64 or float64 [num_events], at least 0, never falling.
        eid: int64 [num_events], the row of an event's features: its place by time in the whole list.
        features: float32 [rows, edge_dim] that `eid` points into, shared by slices; or None.
        label: where the events come from.
    """

    src: Int64[Tensor, " num_events"]
    dst: Int64[Tensor, " num_events"]
    t: Shaped[Tensor, " num_events"]
    eid: Int64[Tensor, " num_events"]
    features: Float[Tensor, "rows edge_dim"] | None
    label: str

    def __init__(
        self,
        src: Any,
        dst: Any,
        t: Any,
        features: Any = None,
        *,
        sort: bool = False,
        label: str = "",
    ) -> None:
        """Takes tensors, arrays or lists.

        Args:
            src, dst, t, features: see the attributes; a row of features an event.
            sort: take events in any order, and sort them by time.
            label: see the attributes.

        Raises:
            DataError: lengths differ, an id or a time is negative or no number, a feature is not
                finite, or an event is earlier than the one before it and `sort` was not asked for.
        """
        src, dst, t = _ids("src", src), _ids("dst", dst), _times(t)
        if not len(src) == len(dst) == len(t):
            raise DataError(
                f"events: expected src, dst and t of one length, got {len(src)}, {len(dst)}, {len(t)}"
            )
        rows = None if features is None else _rows(features, len(src))
        if len(t) and bool((t.diff() < 0).any()):
            if not sort:
                late = int((t.diff() < 0).nonzero()[0]) + 1
                raise DataError(
                    f"events: expected times that never fall, event {late} is earlier than the one "
                    f"before it ({t[late].item()} after {t[late - 1].item()}); give sort=True"
                )
            order = t.argsort(stable=True)
            src, dst, t = src[order], dst[order], t[order]
            rows = None if rows is None else rows[order]
        self._set(src, dst, t, torch.arange(len(src)), rows, label)

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
        return object.__new__(Events)._set(*cut, self.features, self.label)

    @property
    def num_nodes(self) -> int:
        """The largest node and one more; 0 without events."""
        return int(max(self.src.max(), self.dst.max())) + 1 if len(self) else 0

    @property
    def edge_dim(self) -> int:
        """Columns of features; 0 without."""
        return 0 if self.features is None else self.features.shape[1]

    def split(self, *shares: float) -> list[Events]:
        """Cuts by the number of events: `split(0.7, 0.15)` gives three parts, the last what is left.

        Raises:
            DataError: a share is negative, or they exceed 1 together.
        """
        if not (all(share >= 0 for share in shares) and sum(shares) <= 1 + 1e-9):
            raise DataError(
                f"split: expected shares of 0 or more, at most 1 together, got {shares}"
            )
        ends = [round(len(self) * sum(shares[: at + 1])) for at in range(len(shares))]
        return [self[a:b] for a, b in zip([0, *ends], [*ends, len(self)], strict=True)]


def _numbers(name: str, values: Any, num_dims: int) -> Tensor:
    try:
        # A copy: torch takes no arrays that run backwards, and warns of those that are read-only.
        found = values if isinstance(values, Tensor) else torch.from_numpy(np.array(values))
    except (TypeError, ValueError) as error:
        raise DataError(f"{name}: expected an array of numbers: {error}") from error
    if found.ndim != num_dims:
        wanted = "one number" if num_dims == 1 else "a row of numbers"
        raise DataError(f"{name}: expected {wanted} an event, got shape {list(found.shape)}")
    if found.is_complex():
        raise DataError(f"{name}: expected real numbers, got {found.dtype}")
    return found.detach().cpu()


def _ids(name: str, values: Any) -> Tensor:
    found = _numbers(name, values, 1)
    if len(found) and (found.is_floating_point() or found.dtype == torch.bool):
        raise DataError(f"{name}: expected whole numbers, got {found.dtype}")
    found = found.to(torch.int64)
    if (found < 0).any():
        at = int((found < 0).nonzero()[0])
        raise DataError(f"{name} of event {at}: expected 0 or more, got {int(found[at])}")
    return found


def _times(values: Any) -> Tensor:
    found = _numbers("t", values, 1)
    if found.dtype == torch.bool:
        raise DataError(f"t: expected numbers, got {found.dtype}")
    found = found.to(torch.float64 if found.is_floating_point() else torch.int64)
    is_good = torch.isfinite(found) & (found >= 0)
    if not bool(is_good.all()):
        at = int((~is_good).nonzero()[0])
        raise DataError(
            f"t of event {at}: expected a finite time of 0 or more, got {found[at].item()}; count from "
            "an earlier moment if times before 0 are meant"
        )
    return found


def _rows(values: Any, count: int) -> Tensor:
    found = _numbers("features", values, 2).float()
    if len(found) != count:
        raise DataError(f"features: expected a row for each of {count} events, got {len(found)}")
    if not bool(torch.isfinite(found).all()):
        at, column = (~torch.isfinite(found)).nonzero()[0].tolist()
        raise DataError(
            f"features of event {at}, column {column}: expected a finite number, got "
            f"{found[at, column].item()}"
        )
    return found
