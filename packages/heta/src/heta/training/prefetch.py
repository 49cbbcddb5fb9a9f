"""Samples batches and reads their features in a thread of its own, behind the steps."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from heta.graph.part import Part
from heta.graph.sampler import Batch
from heta.rows.store import InputRows, RowRequest
from heta.training.agreement import check_seeds
from shared.comms import Group
from shared.kernels.neighbors import relabel

__all__ = ["BatchReader", "PreparedBatch"]


@dataclass(frozen=True, slots=True, eq=False)
class PreparedBatch:
    """A batch with what can be read before its step.

    Attributes:
        batch: the batch, its edges on the model's device.
        wanted: ids of all input rows by type, those of the seeds included where modules read them.
        seed_position: where the seeds stand in `wanted`; None if modules do not read them.
        features: rows of the types with features.
        features_s: seconds that reading these took.
    """

    batch: Batch
    wanted: dict[str, Tensor]
    seed_position: Tensor | None
    features: dict[str, RowRequest]
    features_s: float


class BatchReader:
    """Prepares batches one after another; all ranks ask for them in one order.

    Args:
        part: this rank's part.
        store: its rows.
        seed: of the draws.
        group: all ranks, for this thread's messages alone; None for a single process.
        check_every: steps between comparisons of the ranks' seeds; 0 for never.
    """

    def __init__(
        self, part: Part, store: InputRows, seed: int, group: Group | None, check_every: int
    ) -> None:
        self._part, self._store, self._seed = part, store, seed
        is_cuda = store.device.type == "cuda"
        self._stream = torch.cuda.Stream(store.device) if is_cuda else None
        self._group, self._check_every = group, check_every
        self._tables: dict[str, Tensor] = {}
        self._thread = _make_thread()

    def submit(
        self, seeds: Tensor, own: Tensor, fanouts: Sequence[int], epoch: int, step: int
    ) -> Future[PreparedBatch]:
        """Begins to prepare a batch; the result raises a DataError if ranks' seeds differ.

        Args:
            seeds: the whole batch, the same on every rank.
            own: this rank's seeds.
            fanouts: most in-edges of a node and relation, the hop next to the seeds first.
            epoch, step: name the random draws.
        """
        return self._thread.submit(self._prepare, seeds, own, fanouts, epoch, step)

    def receive(self, prepared: Future[PreparedBatch]) -> PreparedBatch:
        """Waits for a batch that was submitted."""
        received = prepared.result()
        if self._stream is not None:
            # Else the thread would take their memory for its next batch while this step still reads.
            current = torch.cuda.current_stream(self._store.device)
            for request in received.features.values():
                request.rows.record_stream(current)
            for tensor in received.batch.edge_tensors():
                tensor.record_stream(current)
        return received

    def close(self) -> None:
        """Ends the thread; the next batch starts another."""
        self._thread.shutdown()
        self._thread = _make_thread()

    def _prepare(
        self, seeds: Tensor, own: Tensor, fanouts: Sequence[int], epoch: int, step: int
    ) -> PreparedBatch:
        # States of other numbers of seeds must never meet.
        if self._group is not None and self._check_every and step % self._check_every == 0:
            check_seeds(self._group, seeds, step)
        batch = self._part.sample(
            own, fanouts, epoch=epoch, step=step, seed=self._seed, tables=self._tables
        )
        wanted, position = dict(batch.inputs), None
        if self._part.uses_dst:
            target = self._part.schema.target
            first, num_nodes = wanted.get(target, own[:0]), self._part.schema.num_nodes[target]
            if target not in self._tables:
                self._tables[target] = torch.full((num_nodes,), -1, dtype=torch.int32)
            wanted[target], position = relabel(own, num_nodes, first, self._tables[target])
        began = time.perf_counter()
        with torch.no_grad(), self._copying():
            batch = batch.to(self._store.device)
            features = self._store.read_features(wanted)
        return PreparedBatch(batch, wanted, position, features, time.perf_counter() - began)

    @contextmanager
    def _copying(self) -> Iterator[None]:
        """On a GPU copies run beside the step, and are done at the end of the block."""
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            yield
        self._stream.synchronize()


def _make_thread() -> ThreadPoolExecutor:
    """One thread, which starts with its first batch."""
    return ThreadPoolExecutor(1, thread_name_prefix="heta-reader")
