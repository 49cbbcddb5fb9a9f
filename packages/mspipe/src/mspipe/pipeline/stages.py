"""The five stages of an iteration: sample, fetch features, fetch memory, train, write back.

A stage processes one iteration at a time and neither waits nor starts threads; `Pipeline` schedules
when and in which thread each runs.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int64, Shaped
from torch import Tensor
from torch.nn import functional as F

from mspipe.data.batching import Batch
from mspipe.data.sampler import Sampled
from mspipe.memory.node_memory import NodeMemory
from mspipe.memory.row_layout import State
from mspipe.models.base import MemoryModel
from mspipe.pipeline.gpu_streams import GpuStreams
from mspipe.pipeline.iteration import Iteration, Output
from mspipe.pipeline.mitigation import Mitigation, StaleMix
from mspipe.pipeline.report import Report, Span
from mspipe.pipeline.workers import WorkerSlices
from mspipe.pipeline.written_rows import WrittenRows
from mspipe.registry import Mode
from shared.errors import DataError

__all__ = ["NeighborSampler", "Stages"]


@runtime_checkable
class NeighborSampler(Protocol):
    """A sampler of neighbours, over a fixed list of events or a growing graph."""

    def sample(
        self, nodes: Int64[Tensor, " num_roots"], times: Shaped[Tensor, " num_roots"]
    ) -> Sampled:
        """The roots in the order given, with neighbours from before each one's time."""
        ...


class Stages:
    """The stages of one run.

    Args:
        model, memory, sampler, features, workers, mitigation, depth: see `Pipeline`.
        mode: how stages overlap, which decides the source of rows that are not in the store yet.
        report: updated with the figures of the run.
        is_training: compute gradients.

    Attributes:
        num_committed: number of iterations whose rows are all in the store.
        streams: GPU streams on which rows are copied.
        stored: on a GPU, event at the end of the last write; None before the first.
        report, is_training: as given.
    """

    def __init__(
        self,
        model: MemoryModel,
        memory: NodeMemory,
        sampler: NeighborSampler,
        features: Float[Tensor, "num_events edge_dim"] | None,
        *,
        workers: WorkerSlices,
        mitigation: Mitigation | None,
        mode: Mode,
        depth: int,
        report: Report,
        is_training: bool,
    ) -> None:
        self.model, self.memory, self.sampler, self.features = model, memory, sampler, features
        self.workers, self.mode, self.depth = workers, mode, depth
        self.report, self.is_training = report, is_training
        self.num_committed = 0
        self.streams = GpuStreams(self._device)
        self.stored: torch.cuda.Event | None = None
        self._written_rows = WrittenRows(memory.num_nodes)
        self._mix = None
        if mitigation is not None and mode.is_stale:
            self._mix = StaleMix(mitigation, memory, self._written_rows, report)
        self._start_s = time.perf_counter()

    def close(self) -> None:
        """Waits for copies under way and drops the kept rows."""
        self.streams.join()
        self._written_rows.clear()

    @contextmanager
    def timed(self, name: str, index: int) -> Iterator[None]:
        """Times a stage of an iteration; adds a note with both to an error in it."""
        begin = time.perf_counter()
        try:
            yield
        except Exception as error:
            error.add_note(f"mspipe: in stage {name!r} of iteration {index}")
            raise
        end = time.perf_counter()
        self.report.spans.append(Span(name, index, begin - self._start_s, end - self._start_s))

    def sample(self, index: int, batch: Batch) -> Iteration:
        """Samples the neighbours of a batch, and claims the rows that it writes.

        Raises:
            DataError: the batch has no events, or a node is beyond the memory.
        """
        with self.timed("sample", index):
            if not len(batch.events):
                raise DataError(f"batch {index}: expected at least one event, got none")
            if self.memory.start is None:
                self.memory.begin_at(batch.events.t[0].item())
            slice_ = self.workers.slice(batch)
            sampled = self.sampler.sample(*slice_.roots)
            if len(sampled.nodes) and int(sampled.nodes[-1]) >= self._written_rows.num_nodes:
                raise DataError(
                    f"batch {index}: expected nodes below {self._written_rows.num_nodes}, as the "
                    f"memory has them, got {int(sampled.nodes[-1])}; memory.grow makes room before a "
                    f"run"
                )
            writes = self.model.writes(sampled, len(slice_.events))
            owners, places = self._written_rows.find_owners(sampled.nodes)
            written = sampled.nodes[writes] if slice_ is batch else self._find_written(batch)
            written_owners = self._written_rows.claim(written, index)
            return Iteration(
                index, slice_, len(batch.events), sampled, writes, written, written_owners, owners,
                places, fingerprint=self.workers.fingerprint(batch),
            )  # fmt: skip

    def _find_written(self, batch: Batch) -> Tensor:
        """Nodes that the whole batch writes, of which this worker has a slice."""
        events = batch.events
        ends = torch.cat([events.src, events.dst])
        if not self.model.writes_neighbors:
            return torch.unique(ends)
        sampled = self.sampler.sample(ends, events.t.repeat(2))
        return sampled.nodes[self.model.writes(sampled, len(events))]

    def fetch_features(self, work: Iteration) -> None:
        """Fetches the features of the sampled edges and of the events."""
        with self.timed("features", work.index):
            events, eids, device = work.batch.events, work.sampled.eids, self._device
            if self.features is None:
                found = torch.empty(len(eids), 0), torch.empty(len(events), 0)
            else:
                found = (
                    self.features.index_select(0, eids),
                    self.features.index_select(0, events.eid),
                )
            edges, own = (part.to(device, non_blocking=True) for part in found)
            work.features = edges, own

    def fetch_memory(self, work: Iteration) -> None:
        """Fetches the rows of the sampled nodes that the store has, and those of similar nodes."""
        with self.timed("memory", work.index):
            # In this order: the write that this waits for is at least the last one counted.
            work.num_committed = self.num_committed
            self.streams.after(self.stored)
            is_missing = work.is_missing
            nodes = work.sampled.nodes
            layout = self.memory.layout
            if self.mode.is_forwarding and bool(is_missing.any()):
                there = (~is_missing).nonzero()[:, 0]
                found = self.memory.read_rows(nodes[there])
                rows = found.new_empty(len(nodes), layout.num_words)
                rows[there] = found
            else:
                there = nodes
                rows = self.memory.read_rows(nodes)
            work.rows = rows.to(self._device, non_blocking=True)
            report, num_read = self.report, len(there)
            if self._mix is not None:
                num_read += self._mix.fetch(work)
            report.num_rows_read += num_read
            report.read_bytes += num_read * layout.row_bytes
            oldest = work.owners[is_missing]
            is_exact = not self.mode.is_stale or not len(oldest)
            report.staleness.append(1 if is_exact else work.index - work.num_committed + 1)

    def train(self, work: Iteration) -> tuple[Output, Tensor]:
        """Computes the loss of an iteration, and the rows that it writes.

        The caller times this stage, since it includes the training loop's backward pass.
        """
        # Only here: the training loop's own code keeps its own gradient setting.
        with torch.set_grad_enabled(self.is_training):
            return self._compute(work)

    def _compute(self, work: Iteration) -> tuple[Output, Tensor]:
        assert work.features is not None, "features were fetched before"
        state = self._take_state(work)
        updated = self.model.update(state)
        with torch.no_grad():
            writes = work.writes.to(self._device)
            events, features = work.batch.events, work.features[1]
            new = self.model.mail(work.sampled, writes, state, updated, events.t, features)
            rows = self.memory.layout.pack(new)
            if work.fingerprint is not None:
                self.workers.check(work.index, work.fingerprint, self.model)
                rows = self._merge(work, rows)
            work.computed = self.streams.mark()
        self._keep(work, rows)
        pos, neg = self._score(work, self.model.embed(work.sampled, updated, work.features[0]))
        return Output(self._loss(work, pos, neg), pos, neg, work.batch), rows

    def _take_state(self, work: Iteration) -> State:
        """The state of the sampled nodes, from rows fetched, handed on by others, and mixed."""
        assert work.rows is not None, "rows were fetched before"
        assert work.features is not None, "as were features"
        similar = () if work.similar is None else work.similar[2:]
        self.streams.after(work.arrived, work.rows, *work.features, *similar)
        if self.mode.is_forwarding:
            self._forward_rows(work)
        state = self.memory.unpack(work.rows)
        return state if self._mix is None else self._mix.mix(work, state)

    def _keep(self, work: Iteration, rows: Tensor) -> None:
        """Keeps the rows for later iterations, where these may ask for them."""
        report = self.report
        if self.mode.is_forwarding or self._mix is not None:
            missed = max(1, work.index - work.num_committed)
            depth = self.depth if self.mode.is_forwarding else missed
            kept_bytes = self._written_rows.keep(work.index, rows, depth)
            report.ring_bytes = max(report.ring_bytes, kept_bytes)
        report.num_rows_written += len(rows)
        if self.mode.is_stale:
            report.num_updates_dropped += work.num_dropped

    def _score(self, work: Iteration, embedded: Tensor) -> tuple[Tensor, Tensor]:
        """Logits of the events [num_events] and of their negatives [num_events, num_negatives]."""
        count, negatives = len(work.batch.events), work.batch.negatives
        src, dst, others = embedded.split([count, count, negatives.numel()])
        # In one call, so that the head computes terms of the sources alone once.
        ends = torch.cat([dst[:, None], others.unflatten(0, negatives.shape)], 1)
        pos, neg = self.model.head(src[:, None], ends).tensor_split([1], 1)
        return pos[:, 0], neg

    def _loss(self, work: Iteration, pos: Tensor, neg: Tensor) -> Tensor:
        """This worker's share of the batch's loss; its gradients become the workers' mean."""
        # -log(sigmoid(x)) is softplus(-x), and -log(1 - sigmoid(x)) is softplus(x). The share gives
        # events of all slices the same weight, whatever the slices' sizes.
        share = self.workers.size / work.num_events
        loss = F.softplus(-pos).sum() * share
        if neg.numel():
            loss = loss + F.softplus(neg).sum() * (share / neg.shape[1])
        if loss.requires_grad:
            self.workers.average(loss, self.model)
        return loss

    def _merge(self, work: Iteration, rows: Tensor) -> Tensor:
        """Rows that the whole batch writes, merged from the workers' slices."""
        sampled, count = work.sampled, len(work.batch.events)
        is_end = torch.zeros(len(sampled.nodes), dtype=torch.bool)
        is_end[sampled.roots[: 2 * count]] = True
        return self.workers.merge(
            work.written,
            sampled.nodes[work.writes],
            rows,
            self.model.num_new(sampled, work.writes, count),
            is_end[work.writes],
            self.memory.layout,
        )

    def _forward_rows(self, work: Iteration) -> None:
        """Fills in the rows missing from the store with those that earlier iterations wrote."""
        assert work.rows is not None, "rows were fetched before"
        for owner in range(work.num_committed, work.index):
            mine = (work.owners == owner).nonzero()[:, 0]
            if len(mine):
                kept, device = self._written_rows.get(owner), self._device
                assert kept is not None, "the rows of the last `depth` iterations are kept"
                work.rows[mine.to(device)] = kept[work.places[mine].to(device)]
        self.report.num_rows_forwarded += int(work.is_missing.sum())

    def write(self, work: Iteration, rows: Tensor) -> None:
        """Writes the rows of an iteration back to the store."""
        with self.timed("write", work.index):
            self.memory.write_rows(work.written, rows)
            self.report.written_bytes += len(rows) * self.memory.layout.row_bytes
            self.stored = self.streams.mark()
            self.num_committed = work.index + 1

    @property
    def _device(self) -> torch.device:
        return next(self.model.parameters()).device
