"""Pipelined training of a model with memory: five stages overlapped, with exact results by default.

After MSPipe (arXiv 2402.15113): sample, fetch features, fetch memory, train and write back, each on
its own resource. A fetch may need rows whose write is still under way. MSPipe then fetches stale
memory, with the least staleness that costs no time. `forward`, the default, is exact instead: the
last writer of a row is known once that iteration is sampled, and the rows it writes are known
before its backward pass, so that later iterations take such rows from it, not from the store.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator

from jaxtyping import Float
from torch import Tensor

from mspipe.data.batching import Batch
from mspipe.data.sampler import Sampler
from mspipe.memory.node_memory import NodeMemory
from mspipe.memory.row_layout import RowLayout
from mspipe.models.base import MemoryModel
from mspipe.pipeline.iteration import Output
from mspipe.pipeline.mitigation import Mitigation
from mspipe.pipeline.overlap import Overlap
from mspipe.pipeline.report import Report
from mspipe.pipeline.stages import NeighborSampler, Stages
from mspipe.pipeline.workers import WorkerSlices
from mspipe.registry import MODES
from shared.comms import Group
from shared.errors import ConfigError

__all__ = ["Pipeline"]


class Pipeline:
    """Runs a model over batches, fetching and writing its memory in parallel with training.

    Args:
        model: TGN, JODIE, APAN, or another `MemoryModel`.
        memory: the model's memory; only one pipeline may use it at a time.
        sampler: a `Sampler` of neighbours, or an object with the same `sample`.
        features: float32 [num_events, edge_dim], indexed by the events' `eid`; None for none.
        mode: "sync" runs one stage after another; "prefetch" fetches memory ahead, once the
            previous iteration's write has ended; "forward" is exact without that wait; "stale" may
            miss the latest writes, as MSPipe.
        max_staleness: for "stale": a fetch waits for the writes of all but the last
            `max_staleness` - 1 iterations before it; 1 is exact. None takes the least value that
            the stages' measured durations need, at most 8.
        depth: for "forward": number of iterations whose written rows are kept in this process.
        mitigation: for "stale": mixes the stalest states with those of similar nodes.
        is_fixed: for "stale", with `max_staleness`: a fetch also sees no newer writes than it waits
            for, so that runs are reproducible.
        group: workers that share each batch, all with the same model, stream and settings. Each
            trains its slice, `out.loss.backward()` ends with their mean gradients, and each writes
            the rows of all slices to a memory of its own.
        is_early: pass rows to the write-back stage before the caller's backward pass; False does so
            after the caller's iteration, as MSPipe.
        stages: class that runs the stages of an iteration; a subclass may observe or extend them.

    Raises:
        ConfigError: a setting is out of range, or model, memory and features do not match.
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
        layout = memory.layout
        if layout != RowLayout(model.dim, model.mail_dim, model.slots):
            raise ConfigError(
                f"memory: expected dim, mail_dim and slots of {model.dim}, {model.mail_dim} and "
                f"{model.slots} as the model has them, got {layout.dim}, {layout.mail_dim} and "
                f"{layout.slots}"
            )
        edge_dim = 0 if features is None else features.shape[1]
        if edge_dim != model.edge_dim:
            raise ConfigError(
                f"features: expected {model.edge_dim} columns as the model has edge_dim, got {edge_dim}"
            )
        self.model, self.memory, self.sampler, self.features = model, memory, sampler, features
        if memory.start is None and isinstance(sampler, Sampler):
            memory.begin_at(sampler.begin)
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
        """How stages overlap; may be set between two runs.

        Raises:
            ConfigError: when set: the mode is unknown, or a run is under way.
        """
        return self._mode

    @mode.setter
    def mode(self, mode: str) -> None:
        if self._is_running:
            raise ConfigError("mode: expected no run under way; finish or close its iterator first")
        MODES.check(mode)
        self._mode = mode

    @property
    def num_committed(self) -> int:
        """Number of iterations of the last run whose rows are all in the store."""
        return self._run_stages.num_committed if self._run_stages else 0

    def report(self) -> Report:
        """Figures of the last training, or of the run under way."""
        return self._report

    def train(self, batches: Iterable[Batch]) -> Generator[Output, None, None]:
        """Yields each batch's loss and logits; the caller does the backward pass and the step.

        The model is in training mode. All rows are written when the iterator ends. Closing it early
        leaves the writes of `num_committed` whole iterations in the store, and no threads.

        Raises:
            ConfigError: another run uses the memory.
            DataError: a node, time or feature is out of range, or memory is no longer finite; a
                note gives the stage and iteration.
            CommError: the memory's server does not answer.
        """
        return self._run(batches, is_training=True)

    def score(self, batches: Iterable[Batch]) -> Generator[Output, None, None]:
        """Yields as `train`, without gradients and with the model in evaluation mode.

        The memory is updated too. Runs in mode "sync", whatever the pipeline's mode: never stale.
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
                if mode.is_overlapped:
                    overlap = Overlap(
                        stages, max_staleness=self.max_staleness, depth=self.depth,
                        is_fixed=self.is_fixed, is_early=self.is_early,
                    )  # fmt: skip
                    yield from overlap.run(iter(batches))
                else:
                    yield from self._take_turns(stages, batches)
            finally:
                stages.close()
                self.model.train(was_training)
                self._is_running = False
                if not is_training:
                    self._report = before

    def _take_turns(self, stages: Stages, batches: Iterable[Batch]) -> Iterator[Output]:
        for index, batch in enumerate(batches):
            work = stages.sample(index, batch)
            stages.fetch_features(work)
            stages.fetch_memory(work)
            with stages.timed("train", index):
                output, rows = stages.train(work)
                yield output if stages.is_training else self._gather(output, batch)
            stages.write(work, rows)

    def _gather(self, output: Output, batch: Batch) -> Output:
        """A whole batch's output, gathered from the workers' slices."""
        if self.workers.size == 1:
            return output
        loss = self.workers.gather(output.loss[None]).mean()
        return Output(loss, self.workers.gather(output.pos), self.workers.gather(output.neg), batch)
