"""Storage of a graph: node table, block directory, slabs of edges, and their copies on a device.

Compiled loops update all arrays in host memory. A graph placed on a GPU also has copies of the node
table and the directory on the device, of which an insertion updates the changed rows only; its
edges stay in pinned host memory that the device reads ("hybrid"), or are copied too ("cuda").
Kernels run after their launch has returned, so pinned memory is changed or freed only once all
launched kernels have read it, and copies on the device are changed in the order of streams.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from gnnflow.graph import blocks_compiled as compiled
from gnnflow.graph.device_readers import DeviceReaders
from shared.errors import ConfigError
from shared.kernels.registry import SWITCH, select
from shared.kernels.temporal import Adjacency, count_before
from shared.training import check_gpu, check_num_nodes

__all__ = ["BlockStore", "Placement", "Sizing", "find_device", "watch_readers"]

Placement = Literal["cpu", "cuda", "hybrid"]

# Smallest factor by which arrays grow; pages that are never touched take no memory.
_GROWTH = 1.6
_NODE_BYTES = 56
"""Of a node's entries in the tables that grow with the largest id."""
_SMALL = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Sizing:
    """GNNFlow's adaptive block sizes: slots of the block opened for n new edges of degree D.

    max(n, D) slots while D is below `largest`; from there on, n rounded up to a multiple of
    `largest`.

    Attributes:
        smallest: minimum number of slots of a block.
        largest: degree from which blocks stop doubling.

    Raises:
        ConfigError: not 1 <= smallest <= largest.
    """

    smallest: int = 4
    largest: int = 256

    def __post_init__(self) -> None:
        if not 1 <= self.smallest <= self.largest:
            raise ConfigError(
                f"expected 1 <= min_block <= max_block, got {self.smallest} and {self.largest}"
            )


def find_device(placement: Placement) -> torch.device:
    """The device that runs a placement's queries.

    Raises:
        ConfigError: no such placement; or it needs a GPU, there is none, and Triton's interpreter
            is not selected.
    """
    if placement not in ("cpu", "cuda", "hybrid"):
        raise ConfigError(f"expected placement 'cpu', 'cuda' or 'hybrid', got {placement!r}")
    if placement == "cpu":
        return torch.device("cpu")
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())

    if os.environ.get(SWITCH) != "triton":
        check_gpu("placement", placement)
    # The GPU's code runs on the CPU, under Triton's interpreter.
    select("temporal", "cpu")  # raises, naming what is missing
    return torch.device("cpu")


def watch_readers(placement: Placement, device: torch.device) -> DeviceReaders | None:
    """Where kernels read what could change meanwhile: of placements on a GPU; None elsewhere."""
    return DeviceReaders(device) if placement != "cpu" and device.type == "cuda" else None


class BlockStore:
    """Growable arrays in host memory, and their copies on the placement's device.

    Attributes:
        table, num_blocks, directory, since, neighbors, times, eids: `Adjacency`'s, in host memory.
        totals: int64 [4]: end of the slots ever used, end of the directory entries ever used, free
            slots below that end, number of blocks.
    """

    def __init__(self, time_dtype: torch.dtype, placement: Placement, sizing: Sizing) -> None:
        self.device = find_device(placement)
        self.placement: Placement = placement
        self.sizing = sizing
        self.time_dtype = torch.empty(0, dtype=time_dtype).numpy().dtype
        self._readers = watch_readers(placement, self.device)
        self._pins = placement != "cpu" and self.device.type == "cuda"
        self.table = np.zeros((0, 4), np.int64)
        self.num_blocks = np.zeros(0, np.int32)
        # Three columns are in use; files have four.
        self._numbers = np.zeros((0, 4), np.int32)
        self._rank = np.zeros(0, np.int32)
        self.directory = np.zeros((0, 2), np.int64)
        self.since = np.zeros(0, self.time_dtype)
        self.neighbors = self._slab(0, np.int32)
        self.times = self._slab(0, self.time_dtype)
        self.eids = self._slab(0, np.int32)
        self._chains = np.full(compiled.MAX_CHAINED + 1, -1, np.int64)
        self._region_chains = np.full(128, -1, np.int64)
        self.totals = np.zeros(4, np.int64)
        self._view: Adjacency | None = None

    # Growing ------------------------------------------------------------------------------------

    def reserve_nodes(self, num_nodes: int) -> None:
        """Grows the node arrays to hold ids below `num_nodes`.

        Raises:
            MemoryError: allocation failed; nothing has changed.
        """
        have = len(self.table)
        if num_nodes <= have:
            return
        check_num_nodes(num_nodes, _NODE_BYTES)
        size = max(num_nodes, int(have * _GROWTH))
        names = ("table", "num_blocks", "_numbers", "_rank")
        try:
            grown = [_copy_grown(getattr(self, name), size) for name in names]
        except MemoryError as error:
            raise MemoryError(
                f"no memory for node ids up to {num_nodes - 1} at {_NODE_BYTES} bytes each; renumber "
                f"sparse ids, for instance with pandas.factorize"
            ) from error
        for name, array in zip(names, grown, strict=True):
            setattr(self, name, array)
        self._view = None

    def _reserve(self, slots: int, entries: int) -> None:
        grown: dict[str, np.ndarray] = {}
        if slots > len(self.times):
            size = max(slots, int(len(self.times) * _GROWTH))
            for name in ("neighbors", "times", "eids"):
                old = getattr(self, name)
                grown[name] = self._slab(size, old.dtype)
                grown[name][: self.totals[0]] = old[: self.totals[0]]
        if entries > len(self.directory):
            size = max(entries, int(len(self.directory) * _GROWTH))
            for name in ("directory", "since"):
                grown[name] = _copy_grown(getattr(self, name), size, used=int(self.totals[1]))
        for name, array in grown.items():
            setattr(self, name, array)
        if grown:
            self._view = None

    def _slab(self, size: int, dtype: Any) -> np.ndarray:
        # Zeros, so that unused slots do not write uninitialised memory into saved files.
        if not self._pins:
            return np.zeros(size, dtype)
        kind = torch.from_numpy(np.empty(0, dtype)).dtype
        return torch.zeros(size, dtype=kind, pin_memory=True).numpy()

    def _widen(self, name: str, largest: int) -> None:
        """Converts a column to int64 once `largest` does not fit in int32."""
        old = getattr(self, name)
        if largest > _SMALL and old.dtype == np.int32:
            new = self._slab(len(old), np.int64)
            new[: self.totals[0]] = old[: self.totals[0]]
            setattr(self, name, new)
            self._view = None

    # Changing -----------------------------------------------------------------------------------

    def insert(
        self,
        src: np.ndarray,
        dst: np.ndarray,
        times: np.ndarray,
        eids: np.ndarray,
        *,
        largest_eid: int,
        undirected: bool,
        may_be_late: bool,
    ) -> None:
        """Adds checked edges, sorted by time, of nodes that `reserve_nodes` has made room for.

        Raises:
            MemoryError: allocation failed; no edge was added.
        """
        self.wait_for_readers()
        self._widen("neighbors", len(self.table))
        self._widen("eids", largest_eid)
        batch = np.empty((min(len(self.table), 2 * len(src)), 5), np.int64)
        while True:
            num_touched, slots, entries = compiled.insert(
                src, dst, times, eids, undirected, self.table, self.num_blocks, self._numbers,
                self.directory, self.since, self.neighbors, self.times, self.eids, self._rank, batch,
                self._chains, self._region_chains, self.totals, self.sizing.smallest,
                self.sizing.largest, may_be_late,
            )  # fmt: skip
            if slots <= len(self.times) and entries <= len(self.directory):
                break
            self._reserve(slots, entries)
        if self.placement != "cpu":
            touched, had = batch[:num_touched, 0], batch[:num_touched, 4]
            self._send(touched, None if may_be_late else had)

    def expire(self, before: Any) -> tuple[int, int]:
        """Frees all entries earlier than a time; returns how many, and how many are self-loops."""
        self.wait_for_readers()
        bounds = torch.full((len(self.table),), before, dtype=self._time_type, device=self.device)
        counts = count_before(self.adjacency(), bounds).cpu().numpy()
        found = compiled.drop(
            counts, self.table, self.num_blocks, self._numbers, self.directory, self.since,
            self.neighbors, self.times, self._chains, self._region_chains, self.totals,
        )  # fmt: skip
        if self.totals[2] > self.totals[0] // 2:
            self._pack()
        self._view = None
        return int(found[0]), int(found[1])

    def _pack(self) -> None:
        live = int(self.table[:, 2].sum() + self._numbers[:, 0].sum())
        entries = 2 * int(self.totals[3]) + 2
        new = {
            "directory": np.zeros((entries, 2), np.int64),
            "since": np.zeros(entries, self.time_dtype),
            **{
                name: self._slab(live, getattr(self, name).dtype)
                for name in ("neighbors", "times", "eids")
            },
        }
        compiled.pack(
            self.table, self.num_blocks, self._numbers, self.directory, self.since, self.neighbors,
            self.times, self.eids, *new.values(), self.totals,
        )  # fmt: skip
        for name, array in new.items():
            setattr(self, name, array)
        self._chains[:] = -1
        self._region_chains[:] = -1

    # Reading ------------------------------------------------------------------------------------

    @property
    def _time_type(self) -> torch.dtype:
        return torch.float64 if self.time_dtype == np.float64 else torch.int64

    def adjacency(self) -> Adjacency:
        """The graph as kernels read it, on the placement's device."""
        if self._view is None:
            columns = {name: torch.from_numpy(getattr(self, name)) for name in _COLUMNS}
            if self.placement != "cpu":
                stays = ("neighbors", "times", "eids") if self.placement == "hybrid" else ()
                columns = {
                    name: column if name in stays else column.to(self.device, copy=True)
                    for name, column in columns.items()
                }
            self._view = Adjacency(**columns)
            self._record_write()
        if self._readers is not None:
            self._readers.order_after_write()
        return self._view

    def mark_read(self) -> None:
        """To be called when kernels over `adjacency()` have been launched, before anybody writes."""
        if self._readers is not None:
            self._readers.record()

    def wait_for_readers(self) -> None:
        """Puts what follows after all launched kernels; no new ones may be launched meanwhile.

        Blocks where kernels read host memory; otherwise this thread's stream waits for them.
        """
        if self._readers is not None and self.placement == "hybrid":
            self._readers.wait()
        elif self._readers is not None:
            self._readers.order_after_readers()

    def _record_write(self) -> None:
        if self._readers is not None:
            self._readers.record_write()

    def _send(self, touched: np.ndarray, old_counts: np.ndarray | None) -> None:
        """Updates the device's copies of touched nodes, and of their edges after the old ones."""
        if self._view is None:
            return  # the next `adjacency()` copies everything
        self._update(self._view, touched, old_counts)
        self._record_write()

    def _update(self, view: Adjacency, touched: np.ndarray, old_counts: np.ndarray | None) -> None:
        self._copy_rows(view, ("table", "num_blocks"), touched)
        blocks = self.num_blocks[touched].astype(np.int64)
        self._copy_rows(view, ("directory", "since"), _ranges(self.table[touched, 3], blocks))
        if self.placement == "hybrid":
            return
        first = np.zeros(len(touched), np.int64) if old_counts is None else old_counts
        slots = [
            self.slots(node)[start:] for node, start in zip(touched.tolist(), first, strict=True)
        ]
        self._copy_rows(view, ("neighbors", "times", "eids"), np.concatenate([*slots, _NONE]))

    def _copy_rows(self, view: Adjacency, names: tuple[str, ...], rows: np.ndarray) -> None:
        index = torch.from_numpy(rows).to(self.device)
        for name in names:
            values = torch.from_numpy(getattr(self, name)[rows]).to(self.device)
            getattr(view, name)[index] = values

    def slots(self, node: int) -> np.ndarray:
        """Slots of a node's edges, oldest first; int64."""
        return _ranges(*self._blocks(node))

    def all_slots(self) -> np.ndarray:
        """Slots of all edges, by node and oldest first; int64."""
        num_blocks = self.num_blocks.astype(np.int64)
        blocks = self.directory[_ranges(self.table[:, 3], num_blocks)]
        ends = np.append(blocks[1:, 1], 0)
        has = num_blocks > 0
        ends[np.cumsum(num_blocks)[has] - 1] = self.table[has, 2]
        return _ranges(blocks[:, 0], ends - blocks[:, 1])

    def capacities(self, node: int) -> list[int]:
        """Slots of each of a node's blocks, oldest first."""
        _, found = self._blocks(node)
        if len(found):
            found[0] += self._numbers[node, 1]
            found[-1] += self._numbers[node, 0]
        return found.tolist()

    def _blocks(self, node: int) -> tuple[np.ndarray, np.ndarray]:
        """First slot and number of edges of each of a node's blocks, oldest first."""
        _, _, count, entry = self.table[node].tolist()
        blocks = self.directory[entry : entry + int(self.num_blocks[node])]
        return blocks[:, 0], np.diff(np.append(blocks[:, 1], count))

    @property
    def payload_bytes(self) -> int:
        """Bytes of one slot."""
        return sum(array.itemsize for array in (self.neighbors, self.times, self.eids))

    @property
    def num_bytes(self) -> int:
        """Host memory in use: slots and directory entries ever used, and the node table."""
        nodes = (self.table, self.num_blocks, self._numbers, self._rank)
        entry_bytes = 16 + self.since.itemsize
        return (
            int(self.totals[0]) * self.payload_bytes
            + int(self.totals[1]) * entry_bytes
            + sum(array.nbytes for array in nodes)
        )

    # Files --------------------------------------------------------------------------------------

    def state(self) -> dict[str, Tensor]:
        """Copies of all arrays to save, by name."""
        slots, entries = int(self.totals[0]), int(self.totals[1])
        used = {
            **{name: getattr(self, name) for name in ("table", "num_blocks", "_numbers")},
            **{name: getattr(self, name)[:entries] for name in ("directory", "since")},
            **{name: getattr(self, name)[:slots] for name in ("neighbors", "times", "eids")},
            **{name: getattr(self, name) for name in ("totals", "_chains", "_region_chains")},
        }
        return {name.strip("_"): torch.from_numpy(array.copy()) for name, array in used.items()}

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Replaces the contents by what `state` returned."""
        own = {name.strip("_"): name for name in vars(self)}
        for name, tensor in state.items():
            setattr(self, own[name], tensor.numpy().copy())
        self._rank = np.zeros(len(self.table), np.int32)
        self._view = None


_COLUMNS = ("table", "num_blocks", "directory", "since", "neighbors", "times", "eids")
_NONE = np.empty(0, np.int64)


def _copy_grown(array: np.ndarray, size: int, used: int | None = None) -> Any:
    new = np.zeros((size, *array.shape[1:]), array.dtype)
    used = len(array) if used is None else used
    new[:used] = array[:used]
    return new


def _ranges(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """The ranges [start, start + length), concatenated."""
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    return np.repeat(starts - (ends - lengths), lengths) + np.arange(total)
