"""Data of an iteration as it passes through the stages, and its output."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from mspipe.data.batching import Batch
from mspipe.data.sampler import Sampled

__all__ = ["Iteration", "Output"]


@dataclass(frozen=True, slots=True, eq=False)
class Output:
    """Loss and logits of an iteration.

    Attributes:
        loss: mean of -log(sigmoid(pos)) plus mean of -log(1 - sigmoid(neg)); with several workers
            each has the share of its slice, scaled so that their mean is the batch's loss.
        pos: [num_events], logits of the events.
        neg: [num_events, num_negatives], logits of their negatives.
        batch: the batch; when several workers train, this one's slice of it.
    """

    loss: Float[Tensor, ""]
    pos: Float[Tensor, " num_events"]
    neg: Float[Tensor, "num_events num_negatives"]
    batch: Batch


@dataclass(slots=True, eq=False)
class Iteration:
    """State of an iteration between the stages.

    Attributes:
        index: number of the iteration in its run.
        batch: this worker's slice of the batch.
        num_events: number of events of all slices.
        sampled: the slice's roots and sampled neighbours.
        writes: indices into `sampled.nodes` of the rows that this worker writes.
        written: nodes that the whole batch writes.
        written_owners: for each of `written` the previous iteration that writes it, or -1.
        owners: for each of `sampled.nodes` the previous iteration that writes it, or -1.
        places: for each of `sampled.nodes` its index among the nodes that its owner writes.
        features: features of the sampled edges, and of the slice's events.
        rows: rows of `sampled.nodes`, as fetched.
        num_committed: number of iterations whose writes were in the store at the fetch.
        similar: indices of stale rows, the nodes similar to each, and those nodes' rows.
        fingerprint: sums that identify the whole batch; None for a single worker.
        arrived: on a GPU, event after which the fetched tensors are there.
        computed: on a GPU, event after which the rows to write are computed.
    """

    index: int
    batch: Batch
    num_events: int
    sampled: Sampled
    writes: Int64[Tensor, " num_written"]
    written: Int64[Tensor, " num_all_written"]
    written_owners: Int64[Tensor, " num_all_written"]
    owners: Int64[Tensor, " num_rows"]
    places: Int64[Tensor, " num_rows"]
    features: tuple[Tensor, Tensor] | None = None
    rows: Float[Tensor, "num_rows words"] | None = None
    num_committed: int = 0
    similar: tuple[Tensor, Tensor, Tensor] | None = None
    fingerprint: Tensor | None = None
    arrived: torch.cuda.Event | None = None
    computed: torch.cuda.Event | None = None

    @property
    def num_dropped(self) -> int:
        """Number of written rows whose previous write was not in the store at the fetch."""
        return int((self.written_owners >= self.num_committed).sum())

    @property
    def is_missing(self) -> Bool[Tensor, " num_rows"]:
        """Which rows have a last write that was not in the store at the fetch."""
        return self.owners >= self.num_committed
