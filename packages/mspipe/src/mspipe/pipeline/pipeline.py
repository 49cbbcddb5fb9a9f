"""Training of a model with memory, its five stages overlapped without changing an answer.

After MSPipe (arXiv 2402.15113): sample, fetch features, fetch memory, train, write back, each on its own
resource. Memory that an iteration needs may still be on its way out when it is fetched. MSPipe fetches
stale memory, as little stale as costs no time. `forward`, the default, is exact instead: which iteration
writes a row last is known when that iteration is sampled, and what it writes is known before its
backward pass, so that such rows are handed on here and never fetched.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator

from jaxtyping import Float
from torch import Tensor

from mspipe.data.batching import Batch
from mspipe.memory.node_memory import NodeMemory
from mspipe.models.base import MemoryModel
from mspipe.pipeline.iteration import Iteration, Output
from mspipe.pipeline.lanes import Lane, StageThreads
from mspipe.pipeline.mitigation import Mitigation
from mspipe.pipeline.report import Report
from mspipe.pipeline.stages import NeighborSampler, Stages
from mspipe.pipeline.stale_schedule import Schedule
from mspipe.pipeline.workers import WorkerSlices
from mspipe.registry import MODES
from shared.comms import Group
from shared.errors import ConfigError

__all__ = ["Pipeline"]

_ROOM = 2  # iterations that wait between two stages
_STOP_S = 1.0


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
        stages: what runs the stages of an iteration; a subclass may watch them or add to them.

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
        mode: str = "forward",
        max_staleness: int | None = None,
        depth: int = 3,
        mitigation: Mitigation | None = None,
        is_fixed: bool = False,
        group: Group | None = None,
        is_early: bool = True,
        stages: type[Stages] = Stages,
    ) -> None:
        how = MODES.get(mode)
        if (max_staleness is not None and max_staleness < 1) or depth < 1:
            raise ConfigError(
                f"expected max_staleness and depth of at least 1, got {max_staleness} and {depth}"
            )
        if not how.is_stale and (max_staleness is not None or mitigation is not None):
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
        self._mode = mode
        self._report = Report(mode=mode)
        self.stages = stages
        self._run_stages: Stages | None = None
        self._is_running = False

    @property
    def mode(self) -> str:
        """How stages overlap; may be set between two runs."""
        return self._mode

    @mode.setter
    def mode(self, mode: str) -> None:
        if self._is_running:
            raise ConfigError("mode: expected no run under way; finish or close its iterator first")
        MODES.check(mode)
        self._mode = mode

    @property
    def num_committed(self) -> int:
        """Iterations of the last run whose writes the store has, whole."""
        return self._run_stages.num_committed if self._run_stages else 0

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
        name = self._mode if is_training else "sync"
        mode = MODES.get(name)
        with self.memory.lease(f"a pipeline's {'train' if is_training else 'score'}"):
            before, self._report = self._report, Report(mode=name)
            self._run_stages = stages = self.stages(
                self.model, self.memory, self.sampler, self.features, workers=self.workers,
                mitigation=self.mitigation, mode=mode, depth=self.depth, report=self._report,
                is_training=is_training,
            )  # fmt: skip
            self.workers.check_memory(self.memory)
            was_training, self._is_running = self.model.training, True
            self.model.train(is_training)
            try:
                run = self._overlap if mode.is_overlapped else self._take_turns
                yield from run(stages, iter(batches))
            finally:
                stages.close()
                self.model.train(was_training)
                self._is_running = False
                if not is_training:
                    self._report = before

    def _take_turns(self, stages: Stages, batches: Iterator[Batch]) -> Iterator[Output]:
        for index, batch in enumerate(batches):
            work = stages.sample(index, batch)
            stages.fetch_features(work)
            stages.fetch_memory(work)
            with stages.timed("train", index):
                output, rows = stages.train(work)
                yield output if stages.is_training else self._gather(output, batch)
            stages.write(work, rows)

    def _overlap(self, stages: Stages, batches: Iterator[Batch]) -> Iterator[Output]:
        # A write that waits for the fetches it must not be seen by needs room for them.
        is_fixed = stages.mode.is_stale and self.is_fixed
        room = max(_ROOM, self.max_staleness or 0) if is_fixed else _ROOM
        works = StageThreads()
        to_fetch, to_train, to_write = Lane(_ROOM), Lane(room), Lane(self.depth)
        fetched: list[int] = []  # iterations whose memory was
        schedule = Schedule(self.max_staleness) if stages.mode.is_stale else None

        def sample() -> None:
            for index, batch in enumerate(batches):
                works.put(to_fetch, stages.sample(index, batch))
            works.close(to_fetch)

        def fetch() -> None:
            while (work := works.take(to_fetch)[0]) is not None:
                with stages.streams.on("in"):
                    stages.fetch_features(work)
                    self._await_memory(stages, works, work, schedule)
                    stages.streams.after(stages.stored)
                    stages.fetch_memory(work)
                    work.arrived = stages.streams.mark()
                works.tell(lambda i=work.index: fetched.append(i))
                if schedule:
                    schedule.observe(stages.report)
                works.put(to_train, work)
            works.close(to_train)

        def write() -> None:
            while (item := works.take(to_write)[0]) is not None:
                work, rows = item
                if is_fixed:
                    unseen = work.index + (self.max_staleness or 1)
                    works.wait(lambda n=unseen: to_train.is_closed or len(fetched) >= n)
                with stages.streams.on("out"):
                    stages.streams.after(work.computed, rows)
                    stages.write(work, rows)
                works.tell()

        for name, stage in (("sampler", sample), ("link in", fetch), ("link out", write)):
            works.start(name, stage)
        try:
            while True:
                work, waited_s = works.take(to_train)
                if work is None:
                    break
                stages.report.waits["fetched rows"] += waited_s
                with stages.timed("train", work.index):
                    if schedule:
                        works.tell(lambda i=work.index: schedule.note_start(i))
                    output, rows = stages.train(work)
                    if self.is_early:
                        stages.report.waits["room to write"] += works.put(to_write, (work, rows))
                    yield output
                if not self.is_early:
                    stages.report.waits["room to write"] += works.put(to_write, (work, rows))
            works.close(to_write)
            works.wait(lambda: stages.num_committed == len(stages.report.staleness))
        finally:
            works.stop(_STOP_S)
            if works.error is not None:
                raise works.error

    def _await_memory(
        self, stages: Stages, works: StageThreads, work: Iteration, schedule: Schedule | None
    ) -> None:
        """Waits until the store has what this iteration needs of it."""
        index = work.index
        if schedule is not None:
            least = index + 1 - schedule.most_staleness
            works.wait(lambda: stages.num_committed >= least)
            if not self.is_fixed:
                works.wait(lambda: stages.num_committed >= index, lambda: schedule.latest_s(index))
            return
        least = index - self.depth if stages.mode.is_forwarding else index
        works.wait(lambda: stages.num_committed >= least)

    def _gather(self, output: Output, batch: Batch) -> Output:
        """What all workers scored of a batch, of which each has a slice."""
        if self.workers.size == 1:
            return output
        loss = self.workers.gather(output.loss[None]).mean()
        return Output(loss, self.workers.gather(output.pos), self.workers.gather(output.neg), batch)
