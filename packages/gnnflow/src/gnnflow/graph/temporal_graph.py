"""A graph of timestamped edges: insertion, exact expiry, and exact queries as of any time.

After GNNFlow: a node's edges are stored in blocks whose sizes follow its degree, so that insertion
rebuilds nothing and wastes little memory. Departure: a directory searched by bisection replaces the
linked list of blocks, so that a query about the past costs the logarithm of the degree.
"""

from __future__ import annotations

import json
import os
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from gnnflow.graph import blocks_compiled as compiled
from gnnflow.graph.block_store import BlockStore, Placement, Sizing
from gnnflow.graph.id_set import IdSet
from gnnflow.graph.rw_lock import ReadWriteLock
from shared.errors import ConfigError, DataError
from shared.files import atomic_file
from shared.kernels.temporal import Adjacency

__all__ = ["Late", "Stats", "TemporalGraph"]

Late = Literal["error", "drop", "merge"]
Column = Any  # a tensor, an array or a list of numbers

_FORMAT = "gnnflow 1"
_REASONS = {1: "source", 2: "destination", 3: "time"}


@dataclass(frozen=True, slots=True)
class Stats:
    """Size and memory of a graph.

    Attributes:
        num_nodes, num_edges: in the graph; an undirected edge counts once.
        num_blocks: blocks of all nodes.
        num_slots: slots of all blocks, and freed slots that are not reused yet.
        fill: stored entries over slots; an undirected edge has two entries.
        num_bytes: host memory in use, node table and directory included.
        bytes_per_entry: `num_bytes` over stored entries.
    """

    num_nodes: int
    num_edges: int
    num_blocks: int
    num_slots: int
    fill: float
    num_bytes: int
    bytes_per_entry: float


class TemporalGraph:
    """Edges (source, destination, time, id), stored by source in order of time."""

    def __init__(
        self,
        num_nodes: int | None = None,
        *,
        undirected: bool = False,
        time_dtype: Literal["int64", "float64"] = "int64",
        placement: Placement = "cpu",
        late: Late = "error",
        blocks: str = "adaptive",
        min_block: int = 4,
        max_block: int = 256,
    ) -> None:
        """Makes an empty graph.

        Args:
            num_nodes: upper bound of node ids, exclusive; None grows the graph with the ids.
            undirected: store every edge at both of its nodes under one id; a self-loop once.
            time_dtype: type of times; 32-bit floats would merge different seconds of Unix time.
            placement: "cpu", "cuda" (node table, directory and edges on the GPU, and a copy in host
                memory) or "hybrid" (edges in pinned host memory that the GPU reads).
            late: what happens to edges older than the newest one of the graph: "error" refuses the
                batch, "drop" leaves them out, "merge" puts them where their times belong.
            blocks: "adaptive": a new block has as many slots as its node has edges.
            min_block: slots of the smallest block.
            max_block: degree from which blocks stop doubling, see `Sizing`.

        Raises:
            ConfigError: a setting has another value, or the placement needs a GPU that is missing.
        """
        if blocks != "adaptive":
            raise ConfigError(
                f"blocks: expected 'adaptive', got {blocks!r}; leave it out, and set min_block "
                f"and max_block to change sizes"
            )
        if time_dtype not in ("int64", "float64"):
            raise ConfigError(f"expected time_dtype 'int64' or 'float64', got {time_dtype!r}")
        if num_nodes is not None and num_nodes < 0:
            raise ConfigError(f"expected num_nodes of at least 0, got {num_nodes}")
        self.undirected = undirected
        self.late: Late = _checked(late)
        self.time_dtype = torch.int64 if time_dtype == "int64" else torch.float64
        self._limit = num_nodes
        self._store = BlockStore(self.time_dtype, placement, Sizing(min_block, max_block))
        self._lock = ReadWriteLock()
        self._num_nodes = num_nodes or 0
        self._num_edges = 0
        self._newest: int | float | None = None
        self._next_eid = 0
        self._ids: IdSet | None = None  # made when an id below the largest is given
        self._version = 0
        self._expired_before: int | float | None = None
        if num_nodes:
            self._store.reserve_nodes(num_nodes)

    # Changing -----------------------------------------------------------------------------------

    def add_edges(
        self,
        src: Column,
        dst: Column,
        t: Column,
        eid: Column | None = None,
        *,
        late: Late | None = None,
    ) -> int:
        """Adds a batch of edges in any order; all of it, or nothing if it raises.

        Args:
            src, dst: node ids, of one length.
            t: times, at least 0.
            eid: unique edge ids, at least 0; when None, ids continue from the largest one.
            late: policy for this batch, in place of the graph's.

        Returns:
            How many edges were added.

        Raises:
            DataError: lengths differ, a row is invalid (the message names it), an edge id is taken,
                or an edge is late and the policy is "error".
            MemoryError: allocation failed.
        """
        late = self.late if late is None else _checked(late)
        src, dst = _array(src, np.int64, "src"), _array(dst, np.int64, "dst")
        t = _array(t, self._store.time_dtype, "t")
        if src.ndim != 1 or not src.shape == dst.shape == t.shape:
            shapes = [src.shape, dst.shape, t.shape]
            raise DataError(f"expected src, dst and t of one length, got shapes {shapes}")
        given = None if eid is None else _array(eid, np.int64, "eid")
        if given is not None and given.shape != src.shape:
            raise DataError(f"expected an eid for each of {len(src)} edges, got {given.shape}")
        with self._lock.writing:
            return self._add(src, dst, t, given, late)

    def _add(
        self,
        src: np.ndarray,
        dst: np.ndarray,
        t: np.ndarray,
        given: np.ndarray | None,
        late: Late,
    ) -> int:
        limit = 2**62 if self._limit is None else self._limit
        at, reason, is_sorted, largest = compiled.check(src, dst, t, limit)
        if reason:
            raise self._bad_row(at, reason, (src, dst, t), limit)
        if not len(src):
            return 0
        eids = np.arange(self._next_eid, self._next_eid + len(src)) if given is None else given
        oldest = (t[0] if is_sorted else t.min()).item()
        is_late = self._newest is not None and oldest < self._newest
        if is_late and late == "error":
            row = int(np.argmax(t < self._newest))
            raise DataError(
                f"edge {row} ({src[row]} -> {dst[row]}) has time {t[row]}, before the graph's "
                f"newest, {self._newest}; use late='merge' to insert late edges in order of time, "
                f"or late='drop' to skip them. Nothing was added"
            )
        if is_late and late == "drop":
            kept = t >= self._newest
            src, dst, t, eids = (column[kept] for column in (src, dst, t, eids))
            given, is_late = None if given is None else eids, False
            if not len(src):
                return 0
        ordered = eids if given is None else self._check_ids(eids)
        if not is_sorted:
            order = np.argsort(t, kind="stable")
            src, dst, t, eids = (column[order] for column in (src, dst, t, eids))
        self._store.reserve_nodes(largest + 1)
        largest_eid = int(ordered[-1])
        self._store.insert(
            src,
            dst,
            t,
            eids,
            largest_eid=largest_eid,
            undirected=self.undirected,
            may_be_late=is_late,
        )
        if self._ids is not None:
            self._ids.add(ordered)
        self._num_nodes = max(self._num_nodes, largest + 1)
        self._num_edges += len(src)
        newest = t[-1].item()
        self._newest = newest if self._newest is None else max(self._newest, newest)
        self._next_eid = max(self._next_eid, largest_eid + 1)
        self._version += 1
        return len(src)

    def expire(self, *, before: float) -> int:
        """Removes exactly the edges with a time earlier than `before`; returns how many.

        Later queries at times up to `before` find nothing, and set `MFG.is_cut`.
        """
        bound = self._time(before)
        with self._lock.writing:
            if self._newest is None:
                return 0
            entries, loops = self._store.expire(bound)
            gone = (entries + loops) // 2 if self.undirected else entries
            self._num_edges -= gone
            if gone:
                self._ids = None
                self._expired_before = max(bound, self._expired_before or bound)
                self._version += 1
            return gone

    def _check_ids(self, eids: np.ndarray) -> np.ndarray:
        """The ids in ascending order; refuses negative, repeated and taken ones."""
        ordered = eids if len(eids) < 2 or (np.diff(eids) > 0).all() else np.sort(eids)
        again = ordered[1:][ordered[1:] == ordered[:-1]]
        if not len(again) and ordered[0] < self._next_eid and self._num_edges:
            if self._ids is None:
                self._ids = IdSet(
                    np.unique(self._store.eids[self._store.all_slots()]).astype(np.int64)
                )
            again = self._ids.find_known(ordered)
        if len(again) or ordered[0] < 0:
            what = f"{again[0]} comes twice" if len(again) else f"{ordered[0]} is negative"
            raise DataError(f"expected unique eids of at least 0, but {what}. Nothing was added")
        return ordered

    def _bad_row(
        self, at: int, reason: int, columns: tuple[np.ndarray, ...], limit: int
    ) -> DataError:
        value = columns[reason - 1][at]
        expected = "that is finite and at least 0" if reason == 3 else f"id in [0, {limit})"
        if reason != 3 and self._limit is None:
            expected = "id of at least 0"
        return DataError(
            f"row {at}: expected a {_REASONS[reason]} {expected}, got {value}. Nothing was added"
        )

    def _time(self, value: float) -> Any:
        if self.time_dtype == torch.int64:
            return int(np.ceil(value))
        return float(value)

    # Reading ------------------------------------------------------------------------------------

    @property
    def num_nodes(self) -> int:
        """One more than the largest id, or the number given when the graph was made."""
        return self._num_nodes

    @property
    def num_edges(self) -> int:
        """Edges in the graph; an undirected one counts once."""
        return self._num_edges

    @property
    def newest(self) -> int | float | None:
        """Time of the newest edge ever added, expired ones included; None before the first."""
        return self._newest

    @property
    def version(self) -> int:
        """Counter of changes; rises with each."""
        return self._version

    @property
    def expired_before(self) -> int | float | None:
        """Edges earlier than this have been removed; None if none were."""
        return self._expired_before

    @property
    def device(self) -> torch.device:
        """The device that runs queries."""
        return self._store.device

    @property
    def reading(self) -> AbstractContextManager[Adjacency]:
        """The edges as kernels read them, by `with graph.reading as adjacency`; blocks writers."""
        return _Reading(self)

    def block_capacities(self, node: int) -> list[int]:
        """Slots of each of a node's blocks, oldest first.

        Raises:
            DataError: there is no such node.
        """
        if not 0 <= node < self._num_nodes:
            raise DataError(f"expected a node in [0, {self._num_nodes}), got {node}")
        with self._lock.reading:
            return self._store.capacities(node) if node < len(self._store.table) else []

    def edges(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """All stored entries: source, neighbour, time and edge id, by source and then by time.

        An undirected edge is listed from both of its nodes.
        """
        with self._lock.reading:
            counts = self._store.table[:, 2]
            index = self._store.all_slots()
            src = np.repeat(np.arange(len(counts)), counts)
            store = self._store
            found = (src, store.neighbors[index], store.times[index], store.eids[index])
        src, dst, times, eids = (torch.from_numpy(np.ascontiguousarray(one)) for one in found)
        return src, dst.long(), times, eids.long()

    def stats(self) -> Stats:
        """Size and memory of the graph."""
        with self._lock.reading:
            entries = int(self._store.table[:, 2].sum())
            slots = int(self._store.totals[0])
            return Stats(
                num_nodes=self._num_nodes,
                num_edges=self._num_edges,
                num_blocks=int(self._store.totals[3]),
                num_slots=slots,
                fill=entries / slots if slots else 1.0,
                num_bytes=self._store.num_bytes,
                bytes_per_entry=self._store.num_bytes / entries if entries else 0.0,
            )

    # Files --------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Copies of tensors and settings, for checkpoints."""
        with self._lock.reading:
            return {"tensors": self._store.state(), "settings": self._settings()}

    def _settings(self) -> dict[str, Any]:
        sizing = self._store.sizing
        return {
            "undirected": self.undirected,
            "late": self.late,
            "time_dtype": str(self.time_dtype).removeprefix("torch."),
            "blocks": ["adaptive", sizing.smallest, sizing.largest],
            "limit": self._limit,
            "num_nodes": self._num_nodes,
            "num_edges": self._num_edges,
            "newest": self._newest,
            "next_eid": self._next_eid,
            "expired_before": self._expired_before,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the graph that `state_dict` was taken from; the placement stays.

        Raises:
            DataError: the state has other entries than a graph's.
        """
        settings = state.get("settings", {})
        if set(settings) != set(self._settings()) or set(state["tensors"]) != set(
            self._store.state()
        ):
            raise DataError("expected the state of a TemporalGraph, got one with other entries")
        # Files may name another strategy of block sizes. Their blocks are kept, since no answer
        # depends on sizes, and new blocks get adaptive sizes.
        _, smallest, largest = settings["blocks"]
        dtype = torch.int64 if settings["time_dtype"] == "int64" else torch.float64
        with self._lock.writing:
            store = BlockStore(dtype, self._store.placement, Sizing(smallest, largest))
            store.load_state(state["tensors"])
            self._store.wait_for_readers()  # its memory is given back
            self._store = store
            self.undirected, self.late = settings["undirected"], settings["late"]
            self.time_dtype, self._limit = dtype, settings["limit"]
            self._num_nodes, self._num_edges = settings["num_nodes"], settings["num_edges"]
            self._newest, self._next_eid = settings["newest"], settings["next_eid"]
            self._expired_before = settings["expired_before"]
            self._ids = None
            self._version += 1

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes one safetensors file, atomically."""
        from safetensors.torch import save_file

        state = self.state_dict()
        # One entry: safetensors writes several in any order; equal graphs must give equal files.
        metadata = {"gnnflow": json.dumps({"format": _FORMAT, "settings": state["settings"]})}
        with atomic_file(path) as partial:
            save_file(state["tensors"], partial, metadata=metadata)

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, placement: Placement = "cpu") -> TemporalGraph:
        """Reads what `save` wrote.

        Raises:
            FileNotFoundError: there is no such file.
            PermissionError: this user may not read it.
            DataError: it is cut, or something else.
        """
        from safetensors import SafetensorError, safe_open

        if not Path(path).is_file():
            raise FileNotFoundError(f"{path}: expected a saved graph, got no file; check the path")
        try:
            # safetensors does not say why a file cannot be read.
            with open(path, "rb"), safe_open(path, framework="pt") as file:
                header = json.loads((file.metadata() or {}).get("gnnflow", "{}"))
                kind = header.get("format") if isinstance(header, dict) else None
                if kind != _FORMAT:
                    raise DataError(
                        f"{path}: expected a graph in the format {_FORMAT!r}, got {kind!r}"
                    )
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
                settings = header["settings"]
        except (SafetensorError, json.JSONDecodeError, KeyError) as error:
            raise DataError(
                f"{path}: expected a saved graph: {error}; the file is damaged"
            ) from error
        graph = cls(placement=placement)
        graph.load_state_dict({"tensors": tensors, "settings": settings})
        return graph


class _Reading:
    # A class: a generator's context manager would take a tenth of a small sample's time.
    __slots__ = ("_graph",)

    def __init__(self, graph: TemporalGraph) -> None:
        self._graph = graph

    def __enter__(self) -> Adjacency:
        self._graph._lock.reading.__enter__()
        return self._graph._store.adjacency()

    def __exit__(self, *error: object) -> None:
        try:
            self._graph._store.mark_read()
        finally:
            self._graph._lock.reading.__exit__(*error)


def _checked(late: str) -> Any:
    if late not in ("error", "drop", "merge"):
        raise ConfigError(f"expected late='error', 'drop' or 'merge', got {late!r}")
    return late


def _array(column: Column, dtype: Any, name: str) -> np.ndarray:
    """A column as a contiguous array of `dtype`; refuses values that do not fit."""
    if isinstance(column, Tensor):  # force=True where it is not needed slows small insertions down
        array = column.numpy(force=column.requires_grad or not column.is_cpu)
    else:
        array = np.asarray(column)
    if array.dtype == dtype:
        return array if array.flags.c_contiguous else np.ascontiguousarray(array)
    if not len(array):
        return np.empty(array.shape, dtype)
    if array.dtype.kind not in "iuf":
        raise DataError(f"expected numbers for {name}, got {array.dtype}")
    with np.errstate(invalid="ignore"):
        found = array.astype(dtype)
        is_same = bool((found == array).all())
    if not is_same and not (dtype == np.float64 and np.isnan(array).any()):
        kind = "whole numbers" if np.dtype(dtype).kind == "i" else "numbers"
        raise DataError(f"expected {kind} that fit {np.dtype(dtype)} for {name}, got {array.dtype}")
    return np.ascontiguousarray(found)
