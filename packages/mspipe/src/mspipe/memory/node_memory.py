"""What a model remembers of each node: a state and its time, and messages that wait to be applied."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor

from mspipe.memory.row_cache import NodeRowCache
from mspipe.memory.row_layout import NO_MAIL, RowLayout, State
from mspipe.memory.rows import RowStore, open_rows
from shared.errors import ConfigError, DataError
from shared.files import atomic_file

__all__ = ["NodeMemory", "latest"]


class NodeMemory:
    """States and messages of nodes, on this machine or another.

    Args:
        num_nodes: number of nodes, a row each.
        dim: width of a state.
        mail_dim: width of a message; a model's `mail_dim`.
        slots: number of messages that a node keeps; a model's `slots`.
        place: "cpu"; "pinned", which a GPU reads fastest; "cuda" or "cuda:1"; "shm:NAME", which all
            processes of a machine see under that name; or "tcp://host:port", of `mspipe serve-memory`.
        start: time of states before their first write, in the unit of the events' times.
        cache_bytes: size of an LRU cache of rows on this machine, for a place behind a slow link that no
            other process writes to; 0 for none.

    Attributes:
        layout: of a row.
        rows: the store of the rows. Another `RowStore` may be put in front of it, such as one that
            models a slow link.
        cache: the rows kept here, if any.

    Raises:
        ConfigError: a size is out of range, or there is no such place.
        DataError: a memory of that name or address has other sizes.
    """

    def __init__(
        self,
        num_nodes: int,
        dim: int,
        mail_dim: int,
        slots: int = 1,
        place: str = "cpu",
        start: float = 0.0,
        cache_bytes: int = 0,
    ) -> None:
        if num_nodes < 0:
            raise ConfigError(f"expected num_nodes of at least 0, got {num_nodes}")
        self.layout = RowLayout(dim, mail_dim, slots)
        self.place, self.start = place, float(start)
        fresh = torch.zeros(1, self.layout.num_words)
        self.layout.unpack(fresh).memory_times.fill_(self.start)
        self.layout.unpack(fresh).mail_times.fill_(NO_MAIL)
        if cache_bytes < 0:
            raise ConfigError(f"expected cache_bytes of at least 0, got {cache_bytes}")
        self.rows: RowStore = open_rows(place, num_nodes, fresh[0])
        self.cache: NodeRowCache | None = None
        if cache_bytes:
            num_kept = min(num_nodes, cache_bytes // self.layout.row_bytes)
            self.rows = self.cache = NodeRowCache(self.rows, self.layout.num_words, num_kept)
        self._journal: dict[int, Tensor] | None = None
        self._leased_by: str | None = None

    @property
    def num_nodes(self) -> int:
        """Rows that there are."""
        return self.rows.num_rows

    @property
    def version(self) -> int:
        """How many writes there were."""
        return self.rows.version

    @property
    def num_bytes(self) -> int:
        """Of all rows."""
        return self.num_nodes * self.layout.row_bytes

    @property
    def device(self) -> torch.device:
        """Where rows that are read arrive."""
        return self.rows.device

    # Reading and writing ------------------------------------------------------------------------

    def read(self, nodes: Int64[Tensor, " n"]) -> State:
        """State, its time, messages and their times of nodes, in the order asked for; a copy.

        Raises:
            DataError: an id is negative or not below `num_nodes`.
            CommError: the server does not answer.
        """
        return self.layout.unpack(self.read_rows(nodes))

    def read_rows(self, nodes: Int64[Tensor, " n"]) -> Float[Tensor, "n words"]:
        """As `read`, not taken apart."""
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
        """Replaces rows, and counts one version.

        Of a node given several times the entry of the latest time counts, and of equal times the last.

        Args:
            nodes: whose.
            memory, times: see `State`; times may be of any type of number.
            mail, mail_times: both, or neither: messages then stay as they are.

        Raises:
            DataError: an id is out of range, shapes do not fit, or a number is NaN or infinite: the
                nodes are named, and nothing is written.
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
        """As `write`, of rows of different nodes."""
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
                f"grow({high + 1}) makes room for new ones"
            )

    # The whole of it ----------------------------------------------------------------------------

    def reset(self) -> None:
        """Sets all rows to their first value, as at the start of an epoch; counts one version.

        Raises:
            ConfigError: a pipeline is at work, or a `preserved` block is open.
        """
        self._refuse("reset")
        if self._journal is not None:
            raise ConfigError("reset: expected no open `preserved` block, whose end would undo it")
        self.rows.reset()

    def grow(self, num_nodes: int) -> None:
        """Makes room for nodes up to `num_nodes`; fewer than there are change nothing.

        Raises:
            ConfigError: a pipeline is at work.
        """
        self._refuse("grow")
        if num_nodes > self.num_nodes:
            self.rows.grow(num_nodes)

    @contextmanager
    def preserved(self) -> Iterator[None]:
        """Undoes at its end what is written inside; the version goes on counting.

        Keeps the rows that are written inside as they were, and nothing else.
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
        """All rows, as a copy on the CPU, and what fits them; for `restore` and checkpoints.

        Raises:
            ConfigError: a pipeline is at work, some of whose writes may be on their way.
        """
        self._refuse("snapshot")
        nodes = torch.arange(self.num_nodes)
        rows = [self.rows.read(part).cpu() for part in nodes.split(1 << 16)]
        words = torch.cat(rows) if rows else self._none()
        about = torch.tensor(
            [self.layout.dim, self.layout.mail_dim, self.layout.slots, self.version]
        )
        return {"rows": words, "about": about}

    def restore(self, snapshot: dict[str, Any]) -> None:
        """Has all rows as in a snapshot, growing if it is larger; later nodes are forgotten.

        Raises:
            DataError: it is of another layout.
        """
        rows, (dim, mail_dim, slots, _) = snapshot["rows"], snapshot["about"].tolist()
        if RowLayout(dim, mail_dim, slots) != self.layout:
            raise DataError(
                f"restore: expected a snapshot of {self.layout}, got one of "
                f"{RowLayout(dim, mail_dim, slots)}"
            )
        self.reset()
        self.grow(len(rows))
        for part in torch.arange(len(rows)).split(1 << 16):
            self.rows.write(part, rows[part])

    def save(self, path: str | Path) -> None:
        """Writes a snapshot as safetensors, whole or not at all."""
        from safetensors.torch import save_file

        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(path) as partial:
            save_file(self.snapshot(), partial)

    def load(self, path: str | Path) -> None:
        """Restores what `save` wrote.

        Raises:
            DataError: the file is damaged, or of another layout.
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
        """Has one writer at a time.

        Raises:
            ConfigError: another one has it.
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
        """Ends connections and shared memory; does nothing the second time."""
        self.rows.close()

    def __repr__(self) -> str:
        return (
            f"NodeMemory({self.num_nodes:,} nodes of {self.layout.row_bytes:,} bytes on {self.place}, "
            f"version {self.version})"
        )


def latest(nodes: Int64[Tensor, " n"], times: Tensor) -> Int64[Tensor, " kept"]:
    """Positions of each node's latest entry; of equal times the last one's. In no order of use.

    By two stable sorts, so that the answer is the same on any device.
    """
    order = times.argsort(stable=True)
    order = order[nodes[order].argsort(stable=True)]
    ordered = nodes[order]
    is_last = torch.ones(len(nodes), dtype=torch.bool, device=nodes.device)
    is_last[:-1] = ordered[1:] != ordered[:-1]
    return order[is_last]


def _check_finite(nodes: Tensor, state: State) -> None:
    # A sum with a number that is not finite is not finite either, and is taken in one pass.
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
