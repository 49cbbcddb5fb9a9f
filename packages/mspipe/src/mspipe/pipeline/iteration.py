"""An iteration: what goes through the stages, and what comes out."""

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
    """What an iteration gives.

    Attributes:
        loss: mean of -log(sigmoid) of events, plus that of negatives' complements; of several workers
            each has its share, and their mean is the batch's.
        pos: [num_events], logits.
        neg: [num_events, num_negatives], logits.
        batch: what was looked at: of several workers that train, this one's slice.
    """

    loss: Float[Tensor, ""]
    pos: Float[Tensor, " num_events"]
    neg: Float[Tensor, "num_events num_negatives"]
    batch: Batch


@dataclass(slots=True, eq=False)
class Iteration:
    """An iteration on its way through the stages.

    Attributes:
        batch: this worker's slice; num_events counts those of all slices, and
            fingerprint identifies the whole batch where there are several workers.
        writes: rows of the sample that this worker writes.
        written, written_owners: nodes that the batch writes, whoever does; and as `owners`.
        owners: the iteration that writes a row last before this one, or -1.
        places: where among the nodes which that iteration writes.
        features: of the sampled edges, and of the slice's events.
        rows: of the sample's nodes, as fetched.
        num_committed: iterations whose writes were in the store then.
        similar: places of stale rows, which nodes are asked for them, and those nodes' rows.
        arrived, computed: on a GPU, that what was fetched is there, and that what is written is.
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
        """Rows that it writes without having seen a write before."""
        return int((self.written_owners >= self.num_committed).sum())

    @property
    def is_missing(self) -> Bool[Tensor, " num_rows"]:
        """Rows that an iteration writes which was not in the store."""
        return self.owners >= self.num_committed
