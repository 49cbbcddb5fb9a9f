"""The data position that users save: a `ReadOrder` that also counts the samples a loader yields."""

from __future__ import annotations

from typing import Any

from bytecheckpoint.state.read_order import ReadOrder
from bytecheckpoint.state.tracked_loader import TrackedLoader

__all__ = ["LoaderState"]


class LoaderState(ReadOrder):
    """Position in an epoch's samples, and the order in which this rank takes them.

    Iterating it yields indices of samples from its position to the end of the epoch; the next
    iteration yields the next epoch. An index counts as consumed when it is yielded. A DataLoader
    takes indices long before it yields their samples: pass it this object as `sampler`, and put the
    result of `track` into the checkpoint. Inside an IterableDataset in a loader's workers, every
    worker is a separate reader.

    Example:
        >>> order = LoaderState(5, shuffle=False, rank=0, world_size=2)
        >>> list(order), order.epoch
        ([0, 2, 4], 1)

    Attributes:
        epoch: the epoch being read, from 0.
        buffer: values that this reader took from its samples and has not used, in order; tensors or
            JSON-like values, which nobody changes in place. When the number of readers changes, whole
            items are redistributed.
        counters: further numbers to save; equal on all ranks.
    """

    def track(self, loader: Any) -> TrackedLoader:
        """Wraps a loader so that checkpoints count the samples it yields, without prefetched ones.

        Args:
            loader: a DataLoader or StatefulDataLoader with this object as its sampler; or a
                StatefulDataLoader of an IterableDataset that iterates this object and gives its
                `state_dict` as its own.

        Raises:
            ConfigError: if what the loader yields cannot be counted.
        """
        return TrackedLoader(loader, self)
