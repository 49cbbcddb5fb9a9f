"""A data loader that saves the position of the batches it has yielded, without prefetched ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from bytecheckpoint.state.read_order import ReadOrder, find_records
from shared.errors import ConfigError, DataError

__all__ = ["TrackedLoader"]


class TrackedLoader:
    """Iterates a loader, resumes where a checkpoint or a `break` left it, and saves its position.

    On the same numbers of ranks and workers, a StatefulDataLoader of torchdata resumes exactly,
    including its workers' states. On other numbers its LoaderState is split again. A plain
    DataLoader always resumes by its LoaderState.

    Attributes:
        epoch: the epoch being read; increases when the loader is exhausted.
    """

    per_rank = True

    def __init__(self, loader: Any, position: ReadOrder | None = None) -> None:
        """Wrap a loader.

        Args:
            loader: a DataLoader or StatefulDataLoader.
            position: the order that it reads by, as its sampler or in the dataset's workers; None:
                only the same number of ranks can load.

        Raises:
            ConfigError: if what the loader yields cannot be counted.
        """
        self.is_stateful = hasattr(loader, "state_dict")
        self._is_sampler = position is not None and loader.sampler is position
        self._loader = loader
        self._position = position
        self._is_open = self._is_finished = False
        if not getattr(loader, "in_order", True):
            raise ConfigError(
                "expected a loader that yields in order, got in_order=False; leave it out"
            )
        if position is not None and not self._is_sampler:
            if isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset):
                raise ConfigError(
                    "expected a loader that reads by this LoaderState; pass it as the loader's "
                    "`sampler`, with a batch_size instead of a batch_sampler"
                )
            if not self.is_stateful:
                raise ConfigError(
                    "expected a loader that reports what its workers read, got a plain "
                    "DataLoader; use torchdata's "
                    "StatefulDataLoader, or a map-style dataset with the LoaderState as its sampler"
                )
        if position is not None and getattr(loader, "snapshot_every_n_steps", 1) != 1:
            raise ConfigError(
                f"expected snapshot_every_n_steps to be 1, got {loader.snapshot_every_n_steps}; a "
                f"LoaderState needs the position of every batch"
            )
        if position is None and not self.is_stateful:
            raise ConfigError(
                "expected a loader that saves its position, got a plain DataLoader; pass it a "
                "LoaderState as `sampler` and wrap it by the LoaderState's `track`"
            )
        self.epoch = 0 if position is None else position.epoch
        self._taken = 0 if position is None else position.taken

    def __len__(self) -> int:
        """Number of batches in an epoch."""
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        """Yields the loader's batches, from its position to the end of the epoch."""
        was_left, num_batches = self._is_open, 0
        for batch in self._read_rest():
            num_batches += 1
            yield batch
        if was_left and not num_batches:
            # The previous iteration stopped after the last batch without exhausting the loader.
            yield from self._read_rest()

    def _read_rest(self) -> Iterator[Any]:
        """Yields the rest of the epoch; afterwards the next epoch begins."""
        was_left, self._is_open, self._is_finished = self._is_open, True, False
        if self.is_stateful:
            if was_left:
                self._loader.load_state_dict(self._patch(self._loader.state_dict()))
            yield from self._loader
        else:
            yield from self._count_batches()
        self._is_open, self._is_finished = False, True
        self.epoch += 1
        if self._position is not None:
            self._position.epoch = self.epoch
            if not self._is_sampler:
                # Workers that start from this object have used the items of theirs.
                self._position.buffer.clear()

    def state_dict(self) -> dict[str, Any]:
        """Returns the position of this rank's loader."""
        if not self.is_stateful:
            assert self._position is not None, "checked at the start"
            record = self._position.state_dict()
            return {"position": record | {"epoch": self.epoch, "taken": self._taken}}
        return {
            "loader": self._patch(self._loader.state_dict()),
            "num_workers": self._loader.num_workers,
            "epoch": self.epoch,
            "is_finished": self._is_finished,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the position of the same rank among the same number of ranks.

        Raises:
            DataError: if the state is of another kind of loader, or of other numbers.
        """
        if self.is_stateful != ("loader" in state):
            raise DataError(
                "the checkpoint is of the other kind of loader (DataLoader, StatefulDataLoader); "
                "use the kind that saved it"
            )
        if self.is_stateful:
            self._loader.load_state_dict(state["loader"])
            self.epoch, self._is_open = state["epoch"], False
            self._is_finished = state["is_finished"]
            record = next(find_records(state), None)
            if self._position is not None and record is not None:
                self._position.epoch = self.epoch
                self._position.counters = dict(record["counters"])
        else:
            assert self._position is not None, "checked at the start"
            self._position.load_state_dict(state["position"])
            self.epoch, self._taken = self._position.epoch, state["position"]["taken"]
            self._is_open = self._is_finished = False

    def load_rank_states(
        self, states: Sequence[dict[str, Any]], rank: int, world_size: int
    ) -> None:
        """Restores the positions of the loaders of any number of ranks.

        Raises:
            ConfigError: if the numbers of ranks or workers changed and what they read cannot be
                split again.
            DataError: if the states do not belong together.
        """
        layouts = {(len(states), state.get("num_workers")) for state in states}
        is_same = self.is_stateful and layouts == {(world_size, self._loader.num_workers)}
        if self._position is None and not is_same:
            raise ConfigError(
                f"this StatefulDataLoader was saved by {_describe(layouts)} and would be loaded "
                f"by {_describe({(world_size, self._loader.num_workers)})}, but has no "
                f"LoaderState that could be split again; load on as many, or pass a LoaderState as "
                f"its sampler and wrap it by `track`"
            )
        # Between two epochs there is nothing to resume, and the next begins everywhere.
        if self._position is None or (is_same and not any(s["is_finished"] for s in states)):
            self.load_state_dict(states[rank])
            return
        found = list(find_records(states))
        if not found:
            raise ConfigError(
                "expected a LoaderState's position in the saved loaders, got none; the "
                "dataset's state_dict must "
                "return (or hold) that of the LoaderState it iterates"
            )
        # Of other numbers than before, as many readers may be a rank's workers now.
        may_be_workers = not is_same and not self._is_sampler
        self._position.load_rank_states(found, rank, world_size, is_split=may_be_workers)
        self.epoch = self._position.epoch
        self._taken = self._position.taken
        self._is_open = self._is_finished = False
        if self.is_stateful:
            self._loader.load_state_dict({})

    def _count_batches(self) -> Iterator[Any]:
        position = self._position
        assert position is not None, "checked at the start"
        position.load_state_dict(self.state_dict()["position"])
        left, batch_size = position.remaining, self._loader.batch_size or 1
        start = self._taken
        for count, batch in enumerate(self._loader, 1):
            self._taken = start + min(left, count * batch_size)
            yield batch
        self._taken = start + left

    def _patch(self, tree: Any) -> Any:
        """A copy in which all positions have what the training loop, not a prefetch, last set."""
        position = self._position
        if isinstance(tree, dict):
            copy = {key: self._patch(value) for key, value in tree.items()}
            if position is not None and next(find_records(copy), None) is copy:
                copy |= {"epoch": self.epoch, "counters": dict(position.counters)}
                if self._is_sampler:
                    copy["buffer"] = list(position.buffer)
            return copy
        if isinstance(tree, list):
            return [self._patch(value) for value in tree]
        return tree


def _describe(layouts: set[tuple[int, int | None]]) -> str:
    return " or ".join(f"{ranks} ranks of {workers or 0} workers" for ranks, workers in layouts)
