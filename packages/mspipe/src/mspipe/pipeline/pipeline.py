"""Training of a model with memory, its five stages overlapped without changing an answer.

After MSPipe (arXiv 2402.15113): sample, fetch features, fetch memory, train, write back, each on its own
resource. Memory that an iteration needs may still be on its way out when it is fetched. MSPipe fetches
stale memory, as little stale as costs no time. `forward`, the default, is exact instead: which iteration
writes a row last is known when that iteration is sampled, and what it writes is known before its
backward pass, so that such rows are handed on here and never fetched.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterable, Iterator
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
from mspipe.models.base import MemoryModel, newest_mail
from mspipe.pipeline.iteration import Iteration, Output
from mspipe.pipeline.lanes import Lane, StageThreads
from mspipe.pipeline.mitigation import Mitigation
from mspipe.pipeline.report import Report, Span
from mspipe.pipeline.stale_schedule import Schedule
from mspipe.pipeline.streams import Streams
from mspipe.pipeline.workers import WorkerSlices
from mspipe.simulator import Mode
from shared.comms import Group
from shared.errors import ConfigError, DataError

__all__ = ["NeighborSampler", "Pipeline"]

_ROOM = 2  # iterations that wait between two stages
_STOP_S = 1.0


@runtime_checkable
class NeighborSampler(Protocol):
    """A sampler: of events that are there from the start, or of a graph that grows."""

    def sample(
        self, nodes: Int64[Tensor, " num_roots"], times: Shaped[Tensor, " num_roots"]
    ) -> Sampled:
        """Roots in the order given, with their neighbours."""
        ...


class Pipeline:
    """Runs a model over batches, its memory fetched and written beside the training.

    Args:
        model: TGN, JODIE, APAN, or another `MemoryModel`.
        memory: its rows; one pipeline at a time.
        sampler: of neighbours; a `Sampler`, or what has its `sample`.
        features: float32 [num_events, edge_dim], the rows that `eid` points into; None for none.
        mode: "sync", one stage after another; "prefetch", memory fetched once the write before it is
            done; "forward", exact and without that wait; "stale", as MSPipe has it.
        max_staleness: of "stale": how many iterations ago a write may be that a fetch does not wait for,
            plus one; 1 is exact, and None takes what the stages' measured times need, 8 at most.
        depth: of "forward": iterations whose written rows are kept here.
        mitigation: of "stale": mixes what is most stale with states of similar nodes.
        is_fixed: of "stale": each fetch sees the writes of exactly all but the last `max_staleness` - 1
            iterations before it, no newer ones, so that runs repeat.
        group: workers that share each batch, all with the same model, stream and settings: each takes its
            slice, `out.loss.backward()` ends with their mean gradients, and each writes the rows of all, to
            a memory of its own.
        is_early: hand rows to be written over before the caller's backward pass, or, as published, after
            the caller is done with the iteration.

    Attributes:
        num_committed: iterations of the last run whose writes the store has, whole.

    Raises:
        ConfigError: a setting is out of range, or model, memory and features do not fit.
    """

    def __init__(
        self,
        model: MemoryModel,
        memory: NodeMemory,
        sampler: NeighborSampler,
        features: Float[Tensor, "num_events edge_dim"] | None = None,
        *,
        mode: Mode = "forward",
        max_staleness: int | None = None,
        depth: int = 3,
        mitigation: Mitigation | None = None,
        is_fixed: bool = False,
        group: Group | None = None,
        is_early: bool = True,
    ) -> None:
        if mode not in ("sync", "prefetch", "forward", "stale"):
            raise ConfigError(f"mode: expected sync, prefetch, forward or stale, got {mode!r}")
        if (max_staleness is not None and max_staleness < 1) or depth < 1:
            raise ConfigError(
                f"expected max_staleness and depth of at least 1, got {max_staleness} and {depth}"
            )
        if mode != "stale" and (max_staleness is not None or mitigation is not None):
            raise ConfigError(f"max_staleness and mitigation: expected mode 'stale', got {mode!r}")
        if is_fixed and max_staleness is None:
            raise ConfigError("is_fixed: expected max_staleness with it, got None")
        wanted = (model.dim, model.mail_dim, model.slots)
        layout = memory.layout
        if (layout.dim, layout.mail_dim, layout.slots) != wanted:
            raise ConfigError(
                f"memory: expected dim, mail_dim and slots of {wanted} as the model has them, got "
                f"{(layout.dim, layout.mail_dim, layout.slots)}"
            )
        edge_dim = 0 if features is None else features.shape[1]
        if edge_dim != model.edge_dim:
            raise ConfigError(
                f"features: expected {model.edge_dim} columns as the model has edge_dim, got {edge_dim}"
            )
        self.model, self.memory, self.sampler, self.features = model, memory, sampler, features
        self.max_staleness, self.depth, self.is_early = max_staleness, depth, is_early
        self.mitigation, self.is_fixed = mitigation, is_fixed
        self.workers = WorkerSlices(group)
        self._mode: Mode = mode
        self._report = Report(mode=mode)
        self._is_running = False
        self.num_committed = 0

    @property
    def mode(self) -> Mode:
        """How stages overlap; may be set between two runs."""
        return self._mode

    @mode.setter
    def mode(self, mode: Mode) -> None:
        if self._is_running:
            raise ConfigError("mode: expected no run under way; finish or close its iterator first")
        self._mode = mode

    def report(self) -> Report:
        """Figures of the last training, or of the run under way."""
        return self._report

    def train(self, batches: Iterable[Batch]) -> Generator[Output, None, None]:
        """Yields each batch's loss and logits, with the model in training; the caller takes the step.

        Rows are written when the iterator is asked for the next batch or ends. Leaving it early leaves
        `num_committed` iterations in the store, each whole, and no threads.

        Raises:
            ConfigError: another run has the memory.
            DataError: a node, time or feature is out of range, or memory is no longer finite; a note says
                in which stage and iteration.
            CommError: the memory's server does not answer.
        """
        return self._run(batches, is_training=True)

    def score(self, batches: Iterable[Batch]) -> Generator[Output, None, None]:
        """As `train`, without gradients and with the model as in evaluations; memory moves on all the same.

        Reads what is stored, and no stale state, in any mode.
        """
        return self._run(batches, is_training=False)

    # A run --------------------------------------------------------------------------------------

    def _run(self, batches: Iterable[Batch], *, is_training: bool) -> Generator[Output, None, None]:
        mode: Mode = self._mode if is_training else "sync"
        with self.memory.lease(f"a pipeline's {'train' if is_training else 'score'}"):
            self._is_running, self.num_committed, self._num_fetched = True, 0, 0
            before, self._report = self._report, Report(mode=mode)
            self._start_s = time.perf_counter()
            self._streams = Streams(self._device)
            self._is_training = is_training
            self.workers.check_memory(self.memory)
            num_nodes = self.memory.num_nodes
            self._last_writer = torch.full((num_nodes,), -1, dtype=torch.int64)
            self._last_place = torch.zeros(num_nodes, dtype=torch.int64)
            self._ring: dict[int, Tensor] = {}
            self._stored: torch.cuda.Event | None = None
            was_training = self.model.training
            self.model.train(is_training)
            try:
                run = self._in_turn if mode == "sync" else self._overlapped
                yield from run(iter(batches))
            finally:
                self._streams.join()
                self.model.train(was_training)
                self._ring.clear()
                self._is_running = False
                if not is_training:
                    self._report = before

    def _in_turn(self, batches: Iterator[Batch]) -> Iterator[Output]:
        for index, batch in enumerate(batches):
            work = self._sampled(index, batch)
            self._fetch_features(work)
            self._fetch_memory(work)
            with self._stage("train", index):
                output, rows = self._trained(work)
                yield output if self._is_training else self._whole(output, batch)
            self._write(work, rows)

    def _overlapped(self, batches: Iterator[Batch]) -> Iterator[Output]:
        # A write that waits for the fetches it must not be seen by needs room for them.
        is_fixed = self._mode == "stale" and self.is_fixed
        room = max(_ROOM, self.max_staleness or 0) if is_fixed else _ROOM
        works, to_fetch, to_train, to_write = (
            StageThreads(),
            Lane(_ROOM),
            Lane(room),
            Lane(self.depth),
        )
        schedule = Schedule(self.max_staleness) if self._mode == "stale" else None

        def sample() -> None:
            for index, batch in enumerate(batches):
                works.put(to_fetch, self._sampled(index, batch))
            works.close(to_fetch)

        def fetch() -> None:
            while (work := works.take(to_fetch)[0]) is not None:
                with self._streams.on("in"):
                    self._fetch_features(work)
                    self._await_memory(works, work, schedule)
                    self._streams.after(self._stored)
                    self._fetch_memory(work)
                    work.arrived = self._streams.mark()
                works.tell(lambda i=work.index: setattr(self, "_num_fetched", i + 1))
                if schedule:
                    schedule.seen(self._report)
                works.put(to_train, work)
            works.close(to_train)

        def write() -> None:
            while (item := works.take(to_write)[0]) is not None:
                work, rows = item
                if is_fixed:
                    unseen = work.index + (self.max_staleness or 1)
                    works.wait(lambda n=unseen: to_train.is_closed or self._num_fetched >= n)
                with self._streams.on("out"):
                    self._streams.after(work.computed, rows)
                    self._write(work, rows)
                works.tell()

        for name, stage in (("sampler", sample), ("link in", fetch), ("link out", write)):
            works.start(name, stage)
        try:
            while True:
                work, waited_s = works.take(to_train)
                if work is None:
                    break
                self._report.waits["fetched rows"] += waited_s
                with self._stage("train", work.index):
                    if schedule:
                        works.tell(lambda i=work.index: schedule.started(i))
                    output, rows = self._trained(work)
                    if self.is_early:
                        self._report.waits["room to write"] += works.put(to_write, (work, rows))
                    yield output
                if not self.is_early:
                    self._report.waits["room to write"] += works.put(to_write, (work, rows))
            works.close(to_write)
            works.wait(lambda: self.num_committed == len(self._report.staleness))
        finally:
            works.stop(_STOP_S)
            if works.error is not None:
                raise works.error

    # Stages -------------------------------------------------------------------------------------

    @contextmanager
    def _stage(self, name: str, index: int) -> Iterator[None]:
        begin = time.perf_counter()
        try:
            yield
        except Exception as error:
            error.add_note(f"mspipe: in stage {name!r} of iteration {index}")
            raise
        end = time.perf_counter()
        self._report.spans.append(Span(name, index, begin - self._start_s, end - self._start_s))

    def _sampled(self, index: int, batch: Batch) -> Iteration:
        with self._stage("sample", index):
            if not len(batch.events):
                raise DataError(f"batch {index}: expected at least one event, got none")
            slice_ = self.workers.slice(batch)
            sampled = self.sampler.sample(*slice_.roots)
            if len(sampled.nodes) and int(sampled.nodes[-1]) >= len(self._last_writer):
                raise DataError(
                    f"batch {index}: expected nodes below {len(self._last_writer)}, the memory's, got "
                    f"{int(sampled.nodes[-1])}; memory.grow makes room before a run"
                )
            writes = self.model.writes(sampled, len(slice_.events))
            owners, places = self._last_writer[sampled.nodes], self._last_place[sampled.nodes]
            written = sampled.nodes[writes] if slice_ is batch else self._written(batch)
            written_owners = self._last_writer[written]
            self._last_writer[written] = index
            self._last_place[written] = torch.arange(len(written))
            return Iteration(
                index, slice_, len(batch.events), sampled, writes, written, written_owners, owners,
                places, print_of=self.workers.print_of(batch),
            )  # fmt: skip

    def _written(self, batch: Batch) -> Tensor:
        """Nodes that a batch writes, where it is looked at in slices."""
        events = batch.events
        ends = torch.cat([events.src, events.dst])
        if not self.model.writes_neighbors:
            return torch.unique(ends)
        sampled = self.sampler.sample(ends, events.t.repeat(2))
        return sampled.nodes[self.model.writes(sampled, len(events))]

    def _fetch_features(self, work: Iteration) -> None:
        with self._stage("features", work.index):
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

    def _await_memory(
        self, works: StageThreads, work: Iteration, schedule: Schedule | None
    ) -> None:
        """Until the store has what this iteration needs of it."""
        index = work.index
        if schedule is not None:
            least = index + 1 - schedule.most_staleness
            works.wait(lambda: self.num_committed >= least)
            if not self.is_fixed:
                works.wait(lambda: self.num_committed >= index, lambda: schedule.latest_s(index))
            return
        least = index - self.depth if self._mode == "forward" else index
        works.wait(lambda: self.num_committed >= least)

    def _fetch_memory(self, work: Iteration) -> None:
        with self._stage("memory", work.index):
            work.num_committed = self.num_committed
            is_missing = work.is_missing
            nodes = work.sampled.nodes
            layout = self.memory.layout
            if self._report.mode == "forward" and bool(is_missing.any()):
                there = (~is_missing).nonzero()[:, 0]
                found = self.memory.read_rows(nodes[there])
                rows = found.new_empty(len(nodes), layout.num_words)
                rows[there] = found
            else:
                there = nodes
                rows = self.memory.read_rows(nodes)
            work.rows = rows.to(self._device, non_blocking=True)
            report, num_read = self._report, len(there)
            if self.mitigation is not None and report.mode == "stale":
                num_read += self._fetch_similar(work, self.mitigation)
            report.num_rows_read += num_read
            report.read_bytes += num_read * layout.row_bytes
            oldest = work.owners[is_missing]
            is_exact = report.mode != "stale" or not len(oldest)
            report.staleness.append(1 if is_exact else work.index - work.num_committed + 1)

    def _fetch_similar(self, work: Iteration, mitigation: Mitigation) -> int:
        """Rows of nodes that stale ones are mixed with; how many."""
        assert work.rows is not None, "rows were fetched before"
        sampled = work.sampled
        is_root = torch.zeros(len(sampled.nodes), dtype=torch.bool)
        is_root[sampled.roots] = True
        now = work.batch.events.t[-1].double()
        state = self.memory.layout.unpack(work.rows)
        # Nodes that nothing was written of are of the greatest age, and stand for no state.
        is_root &= newest_mail(state)[0].cpu()
        age = now - state.memory_times.cpu()
        stale, asked = mitigation.asked(sampled.nodes, is_root, age)
        rows = self.memory.read_rows(asked.clamp(min=0).flatten())
        work.similar = stale, asked, rows.to(self._device, non_blocking=True)
        return len(rows)

    def _mixed(self, work: Iteration, state: State, mitigation: Mitigation) -> State:
        """The state with what is most stale mixed; and what that teaches about the mix."""
        assert work.similar is not None, "rows of similar nodes were fetched before"
        stale, asked, rows = work.similar
        if not len(stale):
            return state
        here = stale.to(self._device)
        others = self.memory.layout.unpack(rows)
        own = state.memory[here]
        is_there = (asked >= 0).to(self._device)
        mix, is_mixed, mean = mitigation.mixed(own, state.memory_times[here], others, is_there)
        self._report.num_mixed += int(is_mixed.sum())
        self._report.weight = mitigation.weight
        # What the writes that it missed brought is known by now.
        for owner in range(work.num_committed, work.index):
            is_known = ((work.owners[stale] == owner).to(self._device) & is_mixed).nonzero()[:, 0]
            if len(is_known) and owner in self._ring:
                place = work.places[stale[is_known.cpu()]].to(self._device)
                fresh = self.memory.layout.unpack(self._ring[owner][place]).memory
                mitigation.fit(own[is_known], mean[is_known], fresh)
        return state._replace(memory=state.memory.index_copy(0, here, mix))

    def _trained(self, work: Iteration) -> tuple[Output, Tensor]:
        # Not around the caller's part of the loop, whose own setting that is.
        with torch.set_grad_enabled(self._is_training):
            return self._computed(work)

    def _computed(self, work: Iteration) -> tuple[Output, Tensor]:
        assert work.rows is not None, "rows were fetched before"
        assert work.features is not None, "as were features"
        report, is_missing = self._report, work.is_missing
        similar = () if work.similar is None else work.similar[2:]
        self._streams.after(work.arrived, work.rows, *work.features, *similar)
        if report.mode == "forward":
            self._forward_rows(work, is_missing)
        sampled, events, layout = work.sampled, work.batch.events, self.memory.layout
        writes = work.writes.to(self._device)
        state = layout.unpack(work.rows)
        if self.mitigation is not None and report.mode == "stale":
            state = self._mixed(work, state, self.mitigation)
        updated = self.model.update(state)
        with torch.no_grad():
            new = self.model.mail(sampled, writes, state, updated, events.t, work.features[1])
            rows = layout.pack(new)
            if work.print_of is not None:
                self.workers.check(work.index, work.print_of, self.model)
                rows = self._merged(work, rows)
            work.computed = self._streams.mark()
        if report.mode == "forward" or self.mitigation is not None:
            depth = (
                self.depth if report.mode == "forward" else max(1, work.index - work.num_committed)
            )
            self._ring[work.index] = rows
            for old in [i for i in self._ring if i <= work.index - depth]:
                del self._ring[old]
            held = sum(kept.numel() for kept in self._ring.values()) * 4
            report.ring_bytes = max(report.ring_bytes, held)
        report.num_rows_written += len(rows)
        if report.mode == "stale":
            report.num_updates_dropped += work.num_dropped
        embedded = self.model.embed(sampled, updated, work.features[0])
        count, negatives = len(events), work.batch.negatives
        src, dst, others = embedded.split([count, count, negatives.numel()])
        # At once, so that what depends on sources alone is computed once.
        ends = torch.cat([dst[:, None], others.unflatten(0, negatives.shape)], 1)
        pos, neg = self.model.head(src[:, None], ends).tensor_split([1], 1)
        pos = pos[:, 0]
        # -log(sigmoid(x)) is softplus(-x), and -log(1 - sigmoid(x)) is softplus(x). Events of a slice count
        # as much as those of the largest one.
        share = self.workers.size / work.num_events
        loss = F.softplus(-pos).sum() * share
        if negatives.numel():
            loss = loss + F.softplus(neg).sum() * (share / negatives.shape[1])
        if loss.requires_grad:
            self.workers.average(loss, self.model)
        return Output(loss, pos, neg, work.batch), rows

    def _merged(self, work: Iteration, rows: Tensor) -> Tensor:
        """Rows that the batch writes, where slices of it were looked at."""
        sampled, count = work.sampled, len(work.batch.events)
        is_end = torch.zeros(len(sampled.nodes), dtype=torch.bool)
        is_end[sampled.roots[: 2 * count]] = True
        return self.workers.merged(
            work.written,
            sampled.nodes[work.writes],
            rows,
            self.model.num_new(sampled, work.writes, count),
            is_end[work.writes],
            self.memory.layout,
        )

    def _whole(self, output: Output, batch: Batch) -> Output:
        """What all workers scored of a batch."""
        if self.workers.size == 1:
            return output
        loss = self.workers.gathered(output.loss[None]).mean()
        return Output(
            loss, self.workers.gathered(output.pos), self.workers.gathered(output.neg), batch
        )

    def _forward_rows(self, work: Iteration, is_missing: Tensor) -> None:
        """Puts in the rows that the store did not have yet, from what iterations before this one wrote."""
        assert work.rows is not None, "rows were fetched before"
        for owner in range(work.num_committed, work.index):
            mine = (work.owners == owner).nonzero()[:, 0]
            if len(mine):
                device = self._device
                work.rows[mine.to(device)] = self._ring[owner][work.places[mine].to(device)]
        self._report.num_rows_forwarded += int(is_missing.sum())

    def _write(self, work: Iteration, rows: Tensor) -> None:
        with self._stage("write", work.index):
            self.memory.write_rows(work.written, rows)
            self._report.written_bytes += len(rows) * self.memory.layout.row_bytes
            self._stored = self._streams.mark()
            self.num_committed = work.index + 1

    @property
    def _device(self) -> torch.device:
        return next(self.model.parameters()).device
