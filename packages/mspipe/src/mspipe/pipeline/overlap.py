"""A run whose stages overlap: sampling, fetching and writing in threads, training in the caller's.

Iterations pass from one thread to the next through lanes. Each thread waits for what its stage
needs; the only stage with a choice is the fetch of memory, whose start decides what it may miss.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from mspipe.data.batching import Batch
from mspipe.pipeline.iteration import Iteration, Output
from mspipe.pipeline.lanes import Lane, StageThreads
from mspipe.pipeline.stages import Stages
from mspipe.pipeline.stale_schedule import Schedule

__all__ = ["Overlap"]

_ROOM = 2  # maximum number of iterations queued between two stages
_STOP_S = 1.0


class Overlap:
    """The threads of one run.

    Args:
        stages: what is done with an iteration; their mode says whether fetches may be stale.
        max_staleness, depth, is_fixed, is_early: see `Pipeline`.
    """

    def __init__(
        self,
        stages: Stages,
        *,
        max_staleness: int | None,
        depth: int,
        is_fixed: bool,
        is_early: bool,
    ) -> None:
        is_stale = stages.mode.is_stale
        self._stages, self._depth, self._is_early = stages, depth, is_early
        self._schedule = Schedule(max_staleness) if is_stale else None
        # Where staleness is fixed, a write waits for this many fetches after its own iteration's.
        self._num_unseen = (max_staleness or 1) if is_stale and is_fixed else 0
        self._num_fetched = 0
        self._threads = StageThreads()
        self._to_fetch = Lane(_ROOM)
        # A write that waits for fetches: the lane must hold those.
        self._to_train = Lane(max(_ROOM, self._num_unseen))
        self._to_write = Lane(depth)

    def run(self, batches: Iterator[Batch]) -> Iterator[Output]:
        """Yields each iteration's output; ends, or is closed, when no thread is left."""
        threads = self._threads
        threads.start("sampler", lambda: self._sample(batches))
        threads.start("link in", self._fetch)
        threads.start("link out", self._write)
        try:
            yield from self._train()
            threads.close(self._to_write)
            self._await_writes(len(self._stages.report.staleness))
        finally:
            threads.stop(_STOP_S)
            if threads.error is not None:
                raise threads.error

    def _sample(self, batches: Iterator[Batch]) -> None:
        for index, batch in enumerate(batches):
            self._threads.put(self._to_fetch, self._stages.sample(index, batch))
        self._threads.close(self._to_fetch)

    def _fetch(self) -> None:
        stages, threads = self._stages, self._threads
        while (work := threads.take(self._to_fetch)[0]) is not None:
            with stages.streams.on("in"):
                stages.fetch_features(work)
                self._await_memory(work.index)
                stages.fetch_memory(work)
                work.arrived = stages.streams.mark()
            threads.tell(self._count_fetch)
            if self._schedule:
                self._schedule.observe(stages.report)
            threads.put(self._to_train, work)
        threads.close(self._to_train)

    def _train(self) -> Iterator[Output]:
        stages, schedule = self._stages, self._schedule
        while True:
            work, waited_s = self._threads.take(self._to_train)
            if work is None:
                return
            stages.report.waits["fetched rows"] += waited_s
            with stages.timed("train", work.index):
                if schedule:
                    self._threads.tell(lambda i=work.index: schedule.note_start(i))
                output, rows = stages.train(work)
                if self._is_early:
                    self._hand_over(work, rows)
                yield output
            if not self._is_early:
                self._hand_over(work, rows)

    def _hand_over(self, work: Iteration, rows: Tensor) -> None:
        waited_s = self._threads.put(self._to_write, (work, rows))
        self._stages.report.waits["room to write"] += waited_s

    def _write(self) -> None:
        stages, threads = self._stages, self._threads
        while (item := threads.take(self._to_write)[0]) is not None:
            work, rows = item
            if self._num_unseen:
                self._await_fetches(work.index + self._num_unseen)
            with stages.streams.on("out"):
                stages.streams.after(work.computed, rows)
                stages.write(work, rows)
            threads.tell()

    # What stages wait for -----------------------------------------------------------------------

    def _await_memory(self, index: int) -> None:
        """Waits until the store has the writes that an iteration's fetch needs."""
        schedule = self._schedule
        if schedule is None:
            self._await_writes(index - self._depth if self._stages.mode.is_forwarding else index)
            return
        self._await_writes(index + 1 - schedule.most_staleness)
        if not self._num_unseen:  # for newer ones, as long as that costs no time
            self._threads.wait(
                lambda: self._stages.num_committed >= index, lambda: schedule.latest_s(index)
            )

    def _await_writes(self, count: int) -> None:
        self._threads.wait(lambda: self._stages.num_committed >= count)

    def _await_fetches(self, count: int) -> None:
        """Waits for the first `count` fetches, or for the last one."""
        self._threads.wait(lambda: self._to_train.is_closed or self._num_fetched >= count)

    def _count_fetch(self) -> None:
        self._num_fetched += 1
