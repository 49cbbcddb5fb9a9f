"""Stores of rows, and the one in the memory of this process, on the host or a GPU."""

from __future__ import annotations

import threading
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from shared.errors import ConfigError
from shared.kernels.gather import gather
from shared.training import check_device, check_gpu

__all__ = ["LocalRows", "RowStore", "open_rows"]


@runtime_checkable
class RowStore(Protocol):
    """Rows of 32-bit words by id, and a count of writes."""

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        ...

    @property
    def version(self) -> int:
        """Number of writes so far."""
        ...

    @property
    def device(self) -> torch.device:
        """Device of the rows that `read` returns."""
        ...

    def read(self, ids: Int64[Tensor, " n"]) -> Float[Tensor, "n words"]:
        """Copies of rows, each as it was before or after a write of another thread, never in part."""
        ...

    def write(self, ids: Int64[Tensor, " n"], rows: Float[Tensor, "n words"]) -> None:
        """Replaces rows with distinct ids, and increments the version."""
        ...

    def reset(self) -> None:
        """Sets all rows to their initial value."""
        ...

    def grow(self, num_rows: int) -> None:
        """Extends the store to `num_rows` rows; new ones have the initial value."""
        ...

    def close(self) -> None:
        """Releases connections and shared memory."""
        ...


def open_rows(place: str, num_rows: int, fresh: Float[Tensor, " words"]) -> RowStore:
    """Opens the store of a place; new rows are equal to `fresh`.

    Args:
        place: see `NodeMemory`.
        num_rows: number of rows.
        fresh: float32 [words], the initial value of each row.

    Raises:
        ConfigError: there is no such place, or the key of a server cannot be read.
    """
    if place == "cpu":
        return LocalRows(num_rows, fresh, torch.device("cpu"))
    if place == "pinned" or place.split(":")[0] == "cuda":
        if place == "pinned":
            check_gpu("place", place)
        else:
            check_device("place", place)
        device = torch.device("cpu" if place == "pinned" else place)
        return LocalRows(num_rows, fresh, device, is_pinned=place == "pinned")
    if place.startswith("shm:") and len(place) > 4:
        from mspipe.memory.shared_rows import SharedRows

        return SharedRows(place[4:], num_rows, fresh)
    if place.startswith("tcp://"):
        from mspipe.memory.remote_rows import RemoteRows
        from mspipe.memory.shared_key import read_key

        return RemoteRows(place, num_rows, fresh, key=read_key())
    raise ConfigError(
        f"place: expected 'cpu', 'pinned', 'cuda', 'shm:NAME' or 'tcp://host:port', got {place!r}"
    )


class LocalRows:
    """Rows in one tensor of this process.

    Threads take turns, so that none reads a row half written. On a GPU only the launches do: there
    streams must be ordered by their users.

    Args:
        num_rows: number of rows.
        fresh: float32 [words], the initial value of each row.
        device: device of the tensor.
        is_pinned: use page-locked host memory, which a GPU reads directly.
    """

    def __init__(
        self, num_rows: int, fresh: Tensor, device: torch.device, *, is_pinned: bool = False
    ) -> None:
        self.device, self.version = device, 0
        self._fresh, self._is_pinned = fresh.to(device), is_pinned
        self._table = self._made(num_rows)
        self._lock = threading.Lock()  # held while the table is read or changed

    def _made(self, num_rows: int) -> Tensor:
        shape = num_rows, len(self._fresh)
        if self.device.type == "cpu" and not self._is_pinned:
            # numpy asks for huge pages, torch does not; they speed up access to random rows.
            table = torch.from_numpy(np.empty(shape, np.float32))
        else:
            table = torch.empty(shape, device=self.device, pin_memory=self._is_pinned)
        table[:] = self._fresh
        return table

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return len(self._table)

    @property
    def table(self) -> Float[Tensor, "num_rows words"]:
        """The rows themselves; `grow` replaces this tensor."""
        return self._table

    def read(self, ids: Tensor) -> Tensor:
        """Copies of rows."""
        ids = ids.to(self.device)
        # Into pinned memory as well, from which a copy to the GPU is asynchronous.
        shape = len(ids), self._table.shape[1]
        out = torch.empty(shape, device=self.device, pin_memory=self._is_pinned)
        with self._lock:
            return gather(self._table, ids, out)

    def write(self, ids: Tensor, rows: Tensor) -> None:
        """Replaces rows with distinct ids, and increments the version."""
        ids, rows = ids.to(self.device), rows.to(self.device)
        with self._lock:
            self._table.index_copy_(0, ids, rows)
            self.version += 1

    def reset(self) -> None:
        """Sets all rows to their initial value."""
        with self._lock:
            self._table[:] = self._fresh
            self.version += 1

    def grow(self, num_rows: int) -> None:
        """Extends the store to `num_rows` rows; new ones have the initial value."""
        table = self._made(num_rows)
        with self._lock:
            table[: len(self._table)] = self._table
            self._table = table

    def close(self) -> None:
        """Releases the rows."""
        with self._lock:
            self._table = self._table[:0]
