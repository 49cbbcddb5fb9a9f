"""Per-node memory of a model: a state with its time, and messages that wait to be applied."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor

from mspipe.memory.row_cache import NodeRowCache
from mspipe.memory.row_layout import NEVER, NO_MAIL, RowLayout, State
from mspipe.memory.rows import RowStore, open_rows
from shared.errors import ConfigError, DataError
from shared.files import atomic_file
from shared.training import check_num_nodes

__all__ = ["NodeMemory", "latest"]


class NodeMemory:
    """States and messages of nodes, on this machine or another.

    Args:
        num_nodes: number of nodes, a row each.
        dim: width of a state.
        mail_dim: width of a message; a model's `mail_dim`.
        slots: number of messages that a node keeps; a model's `slots`.
        place: where the rows are stored: "cpu"; "pinned", host memory that a GPU reads fastest;
            "cuda" or "cuda:1"; "shm:NAME", memory that all processes of the machine share by name;
            or "tcp://host:port" of an `mspipe serve-memory`, whose key, if it has one, is in the
            environment variable MSPIPE_KEY, or in the file that MSPIPE_KEY_FILE names.
        start: time of states before their first write, in the unit of the events' times. None: that of
            the stream's first event, which the pipeline or the first `commit` sets.
        cache_bytes: size of an LRU cache of rows on this machine, for a place behind a slow link
            that no other process writes to; 0 for none.

    Attributes:
        layout: layout of a row.
        start: as given, or as `begin_at` set it.
        rows: the store of the rows. It may be wrapped in another `RowStore`, such as one that
            models a slow link.
        cache: the LRU cache, None without one.

    Raises:
        ConfigError: a size is out of range, or the place is unknown.
        DataError: a memory of that name or address has other sizes, or there are more rows than this
            machine's memory holds.
    """

    def __init__(
        self,
        num_nodes: int,
        dim: int,
        mail_dim: int,
        slots: int = 1,
        place: str = "cpu",
        start: float | None = None,
        cache_bytes: int = 0,
    ) -> None:
        if num_nodes < 0:
            raise ConfigError(f"expected num_nodes of at least 0, got {num_nodes}")
        self.layout = RowLayout(dim, mail_dim, slots)
        self.place, self.start = place, None if start is None else float(start)
        self._is_start_given = start is not None
        fresh = torch.zeros(1, self.layout.num_words)
        self.layout.unpack(fresh).memory_times.fill_(NEVER if self.start is None else self.start)
        self.layout.unpack(fresh).mail_times.fill_(NO_MAIL)
        if cache_bytes < 0:
            raise ConfigError(f"expected cache_bytes of at least 0, got {cache_bytes}")
        if not place.startswith(("tcp:", "cuda")):
            check_num_nodes(num_nodes, self.layout.row_bytes)
        self.rows: RowStore = open_rows(place, num_nodes, fresh[0])
        self.cache: NodeRowCache | None = None
        if cache_bytes:
            num_kept = min(num_nodes, cache_bytes // self.layout.row_bytes)
            self.rows = self.cache = NodeRowCache(self.rows, self.layout.num_words, num_kept)
        self._journal: dict[int, Tensor] | None = None
        self._leased_by: str | None = None

    @property
    def num_nodes(self) -> int:
        """Number of nodes, each with a row."""
        return self.rows.num_rows

    @property
    def version(self) -> int:
        """Number of writes so far."""
        return self.rows.version

    @property
    def num_bytes(self) -> int:
        """Bytes of all rows."""
        return self.num_nodes * self.layout.row_bytes

    @property
    def device(self) -> torch.device:
        """Device of the rows that `read` returns."""
        return self.rows.device

    # Reading and writing ------------------------------------------------------------------------

    def read(self, nodes: Int64[Tensor, " n"]) -> State:
        """A copy of the nodes' states, messages and their times, in the order given.

        Raises:
            DataError: an id is negative or not below `num_nodes`.
            CommError: the server does not answer.
        """
        return self.unpack(self.read_rows(nodes))

    def unpack(self, rows: Float[Tensor, "n words"]) -> State:
        """Unpacks rows; a state that was never written has the time `start`."""
        state = self.layout.unpack(rows)
        times = state.memory_times
        return state._replace(memory_times=times.masked_fill(times == NEVER, self.start or 0.0))

    def read_rows(self, nodes: Int64[Tensor, " n"]) -> Float[Tensor, "n words"]:
        """As `read`, but whole rows."""
        self._check(nodes)
        return self.rows.read(nodes)

    def write(
        self,
        nodes: Int64[Tensor, " n"],
        memory: Float[Tensor, "n dim"],
        times: Float64[Tensor, " n"],
        mail: Float[Tensor, "n *slots mail_dim"] | None = None,
        mail_times: Float64[Tensor, " n *slots"] | None = None,
    ) -> None:
        """Replaces rows and increments the version.

        For a node given several times the entry with the latest time is written, the last of those
        with equal times.

        Args:
            nodes: nodes to write.
            memory, times: see `State`; times may be of any numeric type.
            mail, mail_times: messages and their times; without both the messages stay as they are.

        Raises:
            DataError: an id is out of range, shapes do not match, or a number is NaN or infinite;
                the message names the nodes, and nothing is written.
            CommError: the server does not answer.
        """
        self._check(nodes)
        if (mail is None) != (mail_times is None):
            raise DataError("write: expected both mail and mail_times, or neither")
        if mail is None or mail_times is None:
            _, _, mail, mail_times = self.read(nodes)
        state = State(memory.detach(), times, mail.detach(), mail_times)
        wanted = [(len(nodes), *part.shape[1:]) for part in self.layout.unpack(self._none())]
        for name, part, shape in zip(State._fields, state, wanted, strict=True):
            if tuple(part.shape) != shape:
                raise DataError(f"write: expected {name} {list(shape)}, got {list(part.shape)}")
        kept = latest(nodes, times)
        if len(kept) < len(nodes):
            nodes, state = nodes[kept], State(*(part[kept] for part in state))
        self.write_rows(nodes, self.layout.pack(state))

    def write_rows(self, nodes: Int64[Tensor, " n"], rows: Float[Tensor, "n words"]) -> None:
        """As `write`, with whole rows of distinct nodes."""
        self._check(nodes)
        state = self.layout.unpack(rows)
        _check_finite(nodes, state)
        if self._journal is not None:
            asked = nodes.tolist()
            new = [at for at, node in enumerate(asked) if node not in self._journal]
            old = self.rows.read(nodes[new])
            self._journal.update(zip((asked[at] for at in new), old, strict=True))
        self.rows.write(nodes, rows)

    def _none(self) -> Tensor:
        return torch.empty(0, self.layout.num_words)

    def _check(self, nodes: Tensor) -> None:
        if nodes.dtype != torch.int64 or nodes.ndim != 1:
            raise DataError(
                f"expected nodes int64 of one dimension, got {nodes.dtype} {list(nodes.shape)}"
            )
        if not len(nodes):
            return
        low, high = (int(bound) for bound in nodes.aminmax())
        if low < 0 or high >= self.num_nodes:
            raise DataError(
                f"expected nodes in [0, {self.num_nodes}), got {low if low < 0 else high}; "
                f"call grow({high + 1}) to add nodes"
            )

    # All rows -----------------------------------------------------------------------------------

    def begin_at(self, time: float) -> None:
        """Sets `start`, unless the memory was made with one."""
        if not self._is_start_given:
            self.start = time

    def reset(self) -> None:
        """Sets all rows to their initial value, as for a new epoch, and increments the version.

        Raises:
            ConfigError: a pipeline's run is open, or a `preserved` block.
        """
        self._refuse("reset")
        if self._journal is not None:
            raise ConfigError("reset: expected no open `preserved` block, whose end would undo it")
        self.rows.reset()

    def grow(self, num_nodes: int) -> None:
        """Adds nodes up to `num_nodes` in all; does nothing if there are as many already.

        Raises:
            ConfigError: a pipeline's run is open.
        """
        self._refuse("grow")
        if num_nodes > self.num_nodes:
            self.rows.grow(num_nodes)

    @contextmanager
    def preserved(self) -> Iterator[None]:
        """Restores the rows written inside the block at its end, which increments the version.

        Only copies of the rows that are written inside are kept.

        Raises:
            ConfigError: another such block is open.
        """
        if self._journal is not None:
            raise ConfigError("preserved: expected no other such block to be open")
        self._journal = {}
        try:
            yield
        finally:
            journal, self._journal = self._journal, None
            if journal:
                self.rows.write(torch.tensor(list(journal)), torch.stack(list(journal.values())))

    def snapshot(self) -> dict[str, Any]:
        """A copy of all rows on the CPU, with their layout and version; for `restore`.

        Raises:
            ConfigError: a pipeline's run is open, whose writes may be under way.
        """
        self._refuse("snapshot")
        nodes = torch.arange(self.num_nodes)
        rows = [self.rows.read(part).cpu() for part in nodes.split(1 << 16)]
        words = torch.cat(rows) if rows else self._none()
        about = torch.tensor(
            [self.layout.dim, self.layout.mail_dim, self.layout.slots, self.version]
        )
        start = torch.tensor([NEVER if self.start is None else self.start], dtype=torch.float64)
        return {"rows": words, "about": about, "start": start}

    def restore(self, snapshot: dict[str, Any]) -> None:
        """Restores all rows from a snapshot, growing if needed; nodes beyond it are reset.

        Raises:
            DataError: the snapshot has another layout.
        """
        rows, (dim, mail_dim, slots, _) = snapshot["rows"], snapshot["about"].tolist()
        if RowLayout(dim, mail_dim, slots) != self.layout:
            raise DataError(
                f"restore: expected a snapshot of {self.layout}, got one of "
                f"{RowLayout(dim, mail_dim, slots)}"
            )
        self.reset()
        self.grow(len(rows))
        # States began at 0 in runs that saved no start.
        start = snapshot["start"].item() if "start" in snapshot else 0.0
        if start != NEVER:
            self.begin_at(start)
        for part in torch.arange(len(rows)).split(1 << 16):
            self.rows.write(part, rows[part])

    def save(self, path: str | Path) -> None:
        """Writes a snapshot to a safetensors file atomically."""
        from safetensors.torch import save_file

        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(path) as partial:
            save_file(self.snapshot(), partial)

    def load(self, path: str | Path) -> None:
        """Restores a snapshot that `save` wrote.

        Raises:
            DataError: the file is damaged, or its snapshot has another layout.
        """
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            snapshot = load_file(path)
        except (OSError, SafetensorError) as error:
            raise DataError(f"{path}: expected a memory that `save` wrote: {error}") from error
        self.restore(snapshot)

    @contextmanager
    def lease(self, who: str) -> Iterator[None]:
        """Reserves the memory for one writer; others are refused until the block ends.

        Args:
            who: name of the writer, for errors.

        Raises:
            ConfigError: another writer has reserved it.
        """
        if self._leased_by is not None:
            raise ConfigError(
                f"memory: {self._leased_by} is at work on it; finish or close that one first"
            )
        self._leased_by = who
        try:
            yield
        finally:
            self._leased_by = None

    def _refuse(self, what: str) -> None:
        if self._leased_by is not None:
            raise ConfigError(
                f"{what}: expected no run under way, but {self._leased_by} is at work on this memory; "
                f"finish or close its iterator first"
            )

    def close(self) -> None:
        """Closes connections and removes shared memory; may be called twice."""
        self.rows.close()

    def __repr__(self) -> str:
        return (
            f"NodeMemory({self.num_nodes:,} nodes of {self.layout.row_bytes:,} bytes on {self.place}, "
            f"version {self.version})"
        )


def latest(nodes: Int64[Tensor, " n"], times: Tensor) -> Int64[Tensor, " kept"]:
    """Index of each node's entry with the latest time, the last of equal times; by ascending node.

    Uses two stable sorts, so that the result is the same on any device.
    """
    order = times.argsort(stable=True)
    order = order[nodes[order].argsort(stable=True)]
    ordered = nodes[order]
    is_last = torch.ones(len(nodes), dtype=torch.bool, device=nodes.device)
    is_last[:-1] = ordered[1:] != ordered[:-1]
    return order[is_last]


def _check_finite(nodes: Tensor, state: State) -> None:
    # Fast check in one pass: a sum with a non-finite number is not finite.
    if all(bool(part.sum().isfinite()) for part in state):
        return
    is_good = torch.ones(len(nodes), dtype=torch.bool, device=state.memory.device)
    for part in state:
        is_good &= part.reshape(len(nodes), -1).isfinite().all(1)
    if not bool(is_good.all()):
        bad = nodes[~is_good.to(nodes.device)]
        raise DataError(
            f"memory: expected finite numbers, got others for {len(bad)} of {len(nodes)} nodes, the "
            f"first {bad[:5].tolist()}; nothing was written. Lower the learning rate, or clip gradients"
        )
