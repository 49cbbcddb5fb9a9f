"""The position of a run in its data, independent of the number of ranks that read it.

The samples of all epochs form one stream. Ranks that step together have consumed a prefix of it;
readers at different counts (prefetching workers, the uneven end of an epoch) have consumed a prefix
and some samples after it, stored as a bit mask. Of the remaining stream, reader r of n takes
samples r, r + n, r + 2n, ..., so any number of readers can resume where any other number stopped,
without losing or repeating a sample. After the dataloader states of ByteCheckpoint (arXiv
2407.20143), which copy replicated parts and split buffers again; the representation of the position
is ours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import get_worker_info

from bytecheckpoint.state.shuffle import shuffle_samples
from shared.errors import ConfigError, DataError

__all__ = ["ReadOrder", "find_records"]

_MARK = "loader_state"
_VERSION = 1
_FIELDS = {
    _MARK: int,
    "dataset": str,
    "num_samples": int,
    "seed": int,
    "shuffle": bool,
    "seen": int,
    "ahead": bytes,
    "since": int,
    "reader": int,
    "num_readers": int,
    "epoch": int,
    "taken": int,
    "buffer": list,
    "counters": dict,
}
_BLOCK = 1024


class ReadOrder:
    """Position in an epoch's samples, and the order in which a reader takes them.

    Iterating it gives indices of samples and counts each as consumed.

    Attributes:
        epoch: the epoch being read, from 0.
        buffer: values that this reader took from its samples and has not used, in order; tensors or
            JSON-like values, which nobody changes in place. When the number of readers changes, whole
            items are redistributed.
        counters: further numbers to save; equal on all ranks.
    """

    per_rank = True

    def __init__(
        self,
        num_samples: int,
        *,
        dataset: str = "",
        seed: int = 0,
        shuffle: bool = True,
        even: bool = False,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        """Starts at the beginning of the first epoch.

        Args:
            num_samples: number of samples in an epoch.
            dataset: name of the dataset; a checkpoint of another dataset is refused.
            seed: seed of the order.
            shuffle: read samples in a random order that differs by epoch; else in index order.
            even: give every reader the same number of samples per epoch; the remaining samples,
                fewer than world_size, come first in the next epoch. Otherwise some readers take
                one more.
            rank: this rank; None: torch.distributed's, or 0 without a process group.
            world_size: number of ranks; None: torch.distributed's, or 1 without a process group.

        Raises:
            ConfigError: if a number is outside its range.
        """
        is_distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        if rank is None:
            rank = torch.distributed.get_rank() if is_distributed else 0
        if world_size is None:
            world_size = torch.distributed.get_world_size() if is_distributed else 1
        if num_samples < 1 or not 0 <= rank < world_size:
            raise ConfigError(
                f"expected at least one sample and a rank below world_size, got {num_samples} "
                f"samples, rank {rank} of {world_size}"
            )
        self.num_samples = num_samples
        self.dataset = dataset
        self.seed = seed
        self.shuffle = shuffle
        self.even = even
        self.rank = rank
        self.world_size = world_size
        self.epoch = 0
        self.counters: dict[str, Any] = {}
        self._taken = 0
        self._buffer: list[Any] = []
        self._undealt: list[Any] = []
        self._set_origin(0, b"", 0)

    @property
    def buffer(self) -> list[Any]:
        """Values taken from this reader's samples and not used yet; see the class."""
        if self._undealt:
            # Split here, because the reader may be a worker that did not exist at load time.
            reader, num_readers = self._find_reader()
            count = len(self._undealt)
            self._buffer = self._undealt[
                reader * count // num_readers : (reader + 1) * count // num_readers
            ]
            self._undealt = []
        return self._buffer

    def __len__(self) -> int:
        """Number of the epoch's samples for this reader, including those already taken."""
        return self._count_taken(self.epoch, *self._find_reader()) - self._count_taken(
            self.epoch - 1, *self._find_reader()
        )

    def __iter__(self) -> Iterator[int]:
        """Indices of samples, to the end of the epoch."""
        reader, num_readers = self._find_reader()
        self._taken, end = self.taken, self._count_taken(self.epoch, reader, num_readers)
        while self._taken < end:
            counts = np.arange(self._taken, min(self._taken + _BLOCK, end), dtype=np.int64)
            for index in self._find_samples(
                self._find_positions(reader + num_readers * counts)
            ).tolist():
                self._taken += 1
                yield index
        self.epoch += 1

    def pack(
        self, fetch: Callable[[int], torch.Tensor], length: int, *, drop_last: bool = False
    ) -> Iterator[torch.Tensor]:
        """Sequences of equal length from documents of any length, to the end of the epoch.

        The rest of a document is kept in `buffer`, so a checkpoint between two sequences neither
        loses nor repeats tokens.

        Args:
            fetch: function from a sample's index to its tokens [n].
            length: number of tokens in a sequence.
            drop_last: leave out the last, shorter sequence of this reader's epoch.
        """
        yield from self._cut(length)
        for index in self:
            self.buffer.append(fetch(index).clone())  # which may use its memory again
            yield from self._cut(length)
        if drop_last:
            self.buffer.clear()
        while self.buffer:
            yield from self._cut(min(length, sum(map(len, self.buffer))))

    def state_dict(self) -> dict[str, Any]:
        """Returns this reader's position as a record of plain values, and of tensors in `buffer`."""
        reader, num_readers = self._find_reader()
        return {
            _MARK: _VERSION,
            "dataset": self.dataset,
            "num_samples": self.num_samples,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "seen": self._seen,
            "ahead": self._ahead,
            "since": self._since,
            "reader": reader,
            "num_readers": num_readers,
            "epoch": self.epoch,
            "taken": self.taken,
            "buffer": self._buffer_to_send(),
            "counters": dict(self.counters),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the position of the same reader among the same number of readers.

        Raises:
            DataError: if the record is of another dataset, order or reader.
        """
        self._check(state)
        mine, saved = self._find_reader(), (state["reader"], state["num_readers"])
        if mine != saved:
            raise DataError(
                f"expected the position of reader {mine[0]} of {mine[1]}, got that of reader "
                f"{saved[0]} of {saved[1]}; load all readers' with load_rank_states"
            )
        self._set_origin(state["seen"], state["ahead"], state["since"])
        self.epoch, self._taken = state["epoch"], state["taken"]
        self._buffer, self._undealt = list(state["buffer"]), []
        self.counters = dict(state["counters"])

    def load_rank_states(
        self,
        states: Sequence[dict[str, Any]],
        rank: int,
        world_size: int,
        *,
        is_split: bool = False,
    ) -> None:
        """Restores the position from any number of readers; exactly if the number is unchanged.

        Args:
            states: the `state_dict` of every saved reader, in any order.
            rank: this rank.
            world_size: current number of ranks.
            is_split: whether to split again in any case, because readers may run in workers, whose
                number is not known here.

        Raises:
            DataError: if records are missing or do not belong together.
        """
        states = sorted(states, key=lambda state: state["reader"])
        first = states[0] if states else {}
        for state in states:
            self._check(state)
            if state["num_readers"] != first["num_readers"]:
                raise DataError(
                    f"expected as many workers on every rank, got readers of "
                    f"{first['num_readers']} and of {state['num_readers']}"
                )
            if any(state[key] != first[key] for key in ("seen", "ahead", "since")):
                raise DataError(
                    "expected positions from one checkpoint, got readers of different "
                    "checkpoints; load all readers' states of one step"
                )
            if state["counters"] != first["counters"]:
                raise DataError(
                    f"expected equal counters on all ranks, got {first['counters']} on reader 0 "
                    f"and {state['counters']} on reader {state['reader']}"
                )
        if [state["reader"] for state in states] != list(range(first.get("num_readers", 1))):
            raise DataError(
                f"expected the positions of all {first.get('num_readers', 1)} readers, got those "
                f"of {[state['reader'] for state in states]}"
            )
        self.rank, self.world_size = rank, world_size
        if len(states) == world_size and not is_split:
            self.load_state_dict(states[rank])
            return
        self._set_origin(first["seen"], first["ahead"], first["since"])
        taken = [
            max(state["taken"], self._count_taken(state["epoch"] - 1, reader, len(states)))
            for reader, state in enumerate(states)
        ]
        self.epoch, self._taken = min(state["epoch"] for state in states), 0
        self._set_origin(*self._merge(np.array(taken)), self.epoch)
        self._undealt = [item for state in states for item in state["buffer"]]
        self._buffer = []
        self.counters = dict(first["counters"])

    @property
    def taken(self) -> int:
        """Number of samples this reader has taken since the stream was last split."""
        return max(self._taken, self._count_taken(self.epoch - 1, *self._find_reader()))

    @property
    def remaining(self) -> int:
        """Number of the epoch's samples that this reader has not taken yet."""
        return self._count_taken(self.epoch, *self._find_reader()) - self.taken

    def _find_reader(self) -> tuple[int, int]:
        worker = get_worker_info()
        if worker is None:
            return self.rank, self.world_size
        workers = worker.num_workers
        return self.rank * workers + worker.id, self.world_size * workers

    def _set_origin(self, seen: int, ahead: bytes, since: int) -> None:
        """The stream that remains: all from `seen` on, but for the bits set in `ahead`.

        It begins with what epoch `since` reads, even if that lies in the epoch before.
        """
        bits = np.unpackbits(np.frombuffer(ahead, np.uint8), bitorder="little")
        self._seen, self._ahead, self._since = seen, ahead, since
        self._head = seen + np.flatnonzero(bits == 0)
        self._tail = seen + len(bits)

    def _find_positions(self, places: np.ndarray) -> np.ndarray:
        """Positions in the whole stream of places in the one that remains."""
        found = self._tail + places - len(self._head)
        in_head = places < len(self._head)
        found[in_head] = self._head[places[in_head]]
        return found

    def _find_samples(self, positions: np.ndarray) -> np.ndarray:
        epochs, found = positions // self.num_samples, positions % self.num_samples
        if self.shuffle:
            for epoch in np.unique(epochs).tolist():
                mine = epochs == epoch
                found[mine] = shuffle_samples(found[mine], self.num_samples, self.seed, epoch)
        return found

    def _count_taken(self, epoch: int, reader: int, num_readers: int) -> int:
        """How many samples a reader will have taken since the origin when an epoch ends."""
        if epoch < self._since:
            return 0
        bound = (epoch + 1) * self.num_samples
        left = int(np.searchsorted(self._head, bound)) + max(0, bound - self._tail)
        # Places reader, reader + num_readers, ... below `left`.
        return left // num_readers if self.even else max(0, -(-(left - reader) // num_readers))

    def _merge(self, taken: np.ndarray) -> tuple[int, bytes]:
        """The new origin, after every reader has taken its count from the current one."""
        num_readers = len(taken)
        readers = np.arange(num_readers)
        first = int((readers + num_readers * taken).min())
        last = int((readers + num_readers * taken).max())
        places = np.arange(first, last, dtype=np.int64)
        done = places[places // num_readers < taken[places % num_readers]]
        seen = int(self._find_positions(np.array([first]))[0])
        old = np.setdiff1d(np.arange(seen, max(seen, self._tail)), self._head)
        ahead = np.concatenate([self._find_positions(done), old]) - seen
        bits = np.zeros(int(ahead.max()) + 1 if len(ahead) else 0, dtype=bool)
        bits[ahead] = True
        return seen, np.packbits(bits, bitorder="little").tobytes()

    def _cut(self, length: int) -> Iterator[torch.Tensor]:
        buffer = self.buffer
        while buffer and sum(map(len, buffer)) >= length:
            tokens = torch.cat(buffer) if len(buffer) > 1 else buffer[0]
            buffer[:] = [tokens[length:]] if len(tokens) > length else []
            # Of a view, a worker's queue would send the memory of the whole document.
            yield tokens[:length].clone()

    def _buffer_to_send(self) -> list[Any]:
        """The buffer's values, with tensors that have memory of their own.

        A worker's queue sends them from a thread of its own, which moves a tensor into shared
        memory and frees the old while the worker reads it. What is in shared memory before stays
        where it is; the buffer takes it too, so that what stays is not copied again.
        """
        if get_worker_info() is None:
            return [_clone(item) for item in self.buffer]
        for at, item in enumerate(self.buffer):
            if isinstance(item, torch.Tensor) and not _is_shared_whole(item):
                self.buffer[at] = _clone(item).share_memory_()
        return list(self.buffer)

    def _check(self, state: dict[str, Any]) -> None:
        if not isinstance(state, dict) or state.get(_MARK) != _VERSION:
            raise DataError(f"expected a loader's position, version {_VERSION}, got {state!r:.80}")
        for key, kind in _FIELDS.items():
            if not isinstance(state.get(key), kind):
                raise DataError(
                    f"expected {key!r} in a loader's position to be of type {kind.__name__}, got "
                    f"{state.get(key)!r:.80}; the checkpoint is damaged: load another step"
                )
        for key in ("dataset", "num_samples", "seed", "shuffle"):
            if state[key] != getattr(self, key):
                raise DataError(
                    f"expected a position in data of {key} {getattr(self, key)!r}, as this run "
                    f"reads, got one in data of {key} {state[key]!r}; use the data and order that "
                    f"were saved"
                )


def _clone(item: Any) -> Any:
    return item.detach().clone() if isinstance(item, torch.Tensor) else item


def _is_shared_whole(tensor: torch.Tensor) -> bool:
    return tensor.is_shared() and tensor.untyped_storage().nbytes() == tensor.nbytes


def find_records(tree: Any) -> Iterator[dict[str, Any]]:
    """Yields all positions that lie anywhere in a nested state, themselves and not copies."""
    if isinstance(tree, dict):
        if _MARK in tree:
            yield tree
            return
        tree = list(tree.values())
    if isinstance(tree, list | tuple):
        for branch in tree:
            yield from find_records(branch)
