"""An LRU cache in front of a store of rows behind a slow link.

Forwarding hides the time of transfers; only caching reduces the bytes that are transferred.
"""

from __future__ import annotations

import threading

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from mspipe.memory.rows import RowStore
from shared.errors import ConfigError

__all__ = ["NodeRowCache"]


class NodeRowCache:
    """A table of the most recently used rows in front of a store; writes go to both.

    Reads return the same rows as the store, provided that only this process (and workers that write
    the same) writes them. One thread may read while another writes.

    Args:
        rows: the store behind the cache.
        num_words: 32-bit words of a row.
        num_kept: number of rows that the cache holds.

    Attributes:
        num_asked, num_found: rows read so far, and those of them that the cache held.

    Raises:
        ConfigError: there is no room for a single row.
    """

    def __init__(self, rows: RowStore, num_words: int, num_kept: int) -> None:
        if num_kept < 1:
            raise ConfigError(
                f"cache_bytes: expected room for a row of {4 * num_words:,} bytes or more"
            )
        self._rows, self._num_kept = rows, num_kept
        self.device = rows.device
        self._table = torch.empty(num_kept, num_words, device=rows.device)
        self.num_asked = self.num_found = 0
        self._lock = threading.Lock()
        self._forget()

    def _forget(self) -> None:
        # By row: its place in the table or -1, and the number of the write that changed it last.
        self._place = torch.full((self.num_rows,), -1, dtype=torch.int32)
        self._written = torch.zeros(self.num_rows, dtype=torch.int32)
        # By place: the row that it holds or -1, and the time of its last use.
        self._row = torch.full((self._num_kept,), -1, dtype=torch.int64)
        self._used = torch.full((self._num_kept,), -1, dtype=torch.int64)
        self._now = self._num_writes = 0

    @property
    def num_rows(self) -> int:
        """Number of rows of the store."""
        return self._rows.num_rows

    @property
    def version(self) -> int:
        """Number of writes to the store so far."""
        return self._rows.version

    def read(self, ids: Int64[Tensor, " n"]) -> Float[Tensor, "n words"]:
        """Copies of rows; those missing from the cache are read from the store in one request."""
        ids = ids.cpu()
        with self._lock:
            place = self._place[ids].long()
            is_here = place >= 0
            here = place[is_here]
            out = self._table.new_empty(len(ids), self._table.shape[1])
            out[is_here] = self._table[here]
            self._touch(here)
            num_writes = self._num_writes
            self.num_asked += len(ids)
            self.num_found += len(here)
        missing, again = torch.unique(ids[~is_here], return_inverse=True)
        if len(missing):
            found = self._rows.read(missing)
            out[~is_here] = found[again]
            with self._lock:
                # Rows written meanwhile may be newer than those just read: do not cache these.
                is_latest = self._written[missing] <= num_writes
                self._keep(missing[is_latest], found[is_latest])
        return out

    def write(self, ids: Int64[Tensor, " n"], rows: Float[Tensor, "n words"]) -> None:
        """Replaces rows in the store and in the cache."""
        ids = ids.cpu()
        with self._lock:
            # Before the write as well as after it: a read may begin before it and end after it.
            self._num_writes += 1
            self._written[ids] = self._num_writes
        self._rows.write(ids, rows)
        with self._lock:
            self._num_writes += 1
            self._written[ids] = self._num_writes
            self._keep(ids, rows.to(self.device))

    def reset(self) -> None:
        """Sets all rows to their initial value."""
        self._rows.reset()
        with self._lock:
            self._forget()

    def grow(self, num_rows: int) -> None:
        """Extends the store to `num_rows` rows; new ones have the initial value."""
        self._rows.grow(num_rows)
        with self._lock:
            self._forget()

    def close(self) -> None:
        """Closes the store."""
        self._rows.close()

    def _touch(self, places: Tensor) -> None:
        self._now += 1
        self._used[places] = self._now

    def _keep(self, ids: Tensor, rows: Tensor) -> None:
        """Puts rows into the table; if there are more than fit, the last ones."""
        place = self._place[ids].long()
        is_here = place >= 0
        self._table[place[is_here]] = rows[is_here]
        self._touch(place[is_here])
        ids, rows = ids[~is_here][-self._num_kept :], rows[~is_here][-self._num_kept :]
        if not len(ids):
            return
        place = self._used.topk(len(ids), largest=False, sorted=False).indices
        leaving = self._row[place]
        self._place[leaving[leaving >= 0]] = -1
        self._place[ids] = place.int()
        self._row[place] = ids
        self._table[place] = rows
        self._touch(place)
