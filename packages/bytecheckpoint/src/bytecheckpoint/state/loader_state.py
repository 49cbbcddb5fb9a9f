"""The data position that users save: a `ReadOrder` that can also count what a loader yields."""

from __future__ import annotations

from typing import Any

from bytecheckpoint.state.read_order import ReadOrder
from bytecheckpoint.state.tracked_loader import TrackedLoader

__all__ = ["LoaderState"]


class LoaderState(ReadOrder):
    """Position in an epoch's samples, and the order in which this rank takes them.

    Iterate it for indices of samples: it goes on from its position to the end of the epoch, and
    over the next epoch when iterated again. It counts each index as consumed when it gives it out.
    A DataLoader asks for indices long before it yields their samples: pass it this object as
    `sampler` and put what `track` returns into the checkpoint. Inside an IterableDataset in a
    loader's workers, every worker is a reader of its own.

    Example:
        >>> order = LoaderState(5, shuffle=False, rank=0, world_size=2)
        >>> list(order), order.epoch
        ([0, 2, 4], 1)

    Attributes:
        epoch: the one being read, from 0.
        buffer: what this reader took from its samples and has not used, in order; tensors or
            JSON-like values. Items are dealt out again, whole, when the number of readers changes.
        counters: further numbers to keep; equal on all ranks.
    """

    def track(self, loader: Any) -> TrackedLoader:
        """Wraps a loader over this order so that a checkpoint counts what it yields, not prefetches.

        Args:
            loader: a DataLoader or StatefulDataLoader with this object as its sampler; or a
                StatefulDataLoader of an IterableDataset that iterates this object and gives its
                `state_dict` as its own.

        Raises:
            ConfigError: if what the loader yields cannot be counted.
        """
        return TrackedLoader(loader, self)
