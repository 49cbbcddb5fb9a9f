"""The single controller: sends calls to ranks and receives their replies.

A call whose inputs are still being computed is queued here and sent as soon as they are done. It is
sent by a thread that waits for a result, or by a background thread that exists only while calls are
queued, so that an ordinary call needs no thread switch. A rank receives calls in the order in which
they were made.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from datetime import timedelta
from types import TracebackType
from typing import Any, Protocol, runtime_checkable

from hybridflow.workers.dispatch import Call, MethodRoute
from hybridflow.workers.engines.inline import InlineEngine
from hybridflow.workers.engines.rank import RankTask, Reply, ValueStore
from hybridflow.workers.future import Future, Joined
from hybridflow.workers.pool import ResourcePool
from hybridflow.workers.timeline import Span
from shared.errors import ConfigError, RankFailure

__all__ = ["CANCEL_S", "Engine", "Workers"]

_NUM_SPANS = 10_000
_MOST_UNANSWERED = 4
"""Unanswered calls a rank may have: so few that their replies fit into a pipe's buffer. A rank
blocked on sending its reply reads nothing; sending it more would deadlock."""
CANCEL_S = 2.0
"""Seconds that other ranks may take to answer once one has raised; they may be waiting for it."""


@runtime_checkable
class Engine(Protocol):
    """Starts ranks and runs tasks on them; `hybridflow.workers.engines` has four."""

    name: str
    num_ranks: int

    @property
    def store(self) -> ValueStore:
        """Store that writes the controller's values, and reads those of ranks."""

    def submit(self, rank: int, task: RankTask) -> None:
        """Sends a task to a rank, which runs its tasks in the order sent."""

    def receive(self, timeout_s: float | None) -> list[Reply]:
        """Waits for replies, at most `timeout_s` seconds; without limit when None."""

    def close(self, is_failed: bool = False) -> None:
        """Ends the ranks; at once if one has failed."""


class Workers:
    """All ranks of a job, and the calls in progress on them.

    Attributes:
        engine: runs the ranks.
        groups: worker groups on these ranks, in the order in which they were made.

    Example:
        >>> with Workers.inline() as workers:
        ...     pool = workers.pool(1)
        ...     pool.ranks
        (0,)
    """

    def __init__(self, engine: Engine) -> None:
        """Controls the ranks that an engine has started."""
        self.engine = engine
        self._free = list(range(engine.num_ranks))
        self._numbers = itertools.count()
        self._names: set[str] = set()
        self.groups: list[Any] = []
        self._calls: dict[int, Call] = {}
        self._unanswered = [0] * engine.num_ranks
        self._spans: deque[tuple] = deque(maxlen=_NUM_SPANS)
        self._waiting: deque[Call] = deque()
        self._failure: BaseException | None = None
        self._is_open = True
        self._lock = threading.RLock()
        self._answers = threading.Condition(self._lock)
        self._is_receiving = False
        self._forwarder: threading.Thread | None = None

    @staticmethod
    def inline(num_ranks: int = 1) -> Workers:
        """Ranks in this process, run one after another, so that a debugger can stop in a worker.

        Models whose ranks exchange messages need one of the other engines.
        """
        return Workers(InlineEngine(num_ranks))

    @staticmethod
    def local(
        num_ranks: int,
        *,
        timeout: timedelta = timedelta(minutes=5),
        threads_per_rank: int = 1,
        env: Mapping[str, str] | None = None,
    ) -> Workers:
        """Processes of this machine, which communicate by gloo and compute on its CPUs.

        For ranks with a GPU each use `Workers.torchrun` or `Workers.ray`.

        Args:
            num_ranks: number of processes.
            timeout: for the start, and for each message between ranks.
            threads_per_rank: torch's threads in each process.
            env: environment variables set in each process.
        """
        from hybridflow.workers.engines.local import LocalEngine

        return Workers(
            LocalEngine(num_ranks, timeout=timeout, threads_per_rank=threads_per_rank, env=env)
        )

    @staticmethod
    def torchrun(
        *, timeout: timedelta = timedelta(minutes=5), threads_per_rank: int = 1
    ) -> Workers:
        """The processes of a torchrun job, on one machine or many; a script calls this once.

        In torchrun's process of rank 0 this call returns, and the script continues as the
        controller; rank 0 itself runs in a child process. In every other process this call serves
        as that rank until the controller closes, then raises SystemExit(0). So code before the call
        runs in every process, and code after it only in the controller.

        Ranks of one machine share tensors through shared memory; ranks of different machines send
        them over TCP. When a process dies, torchrun ends all of them and, with `--max-restarts`,
        starts them again; a script that saves checkpoints can then resume from the last one.

        Example:
            >>> # train.py, started by: torchrun --nproc-per-node 2 train.py
            >>> def main():
            ...     with Workers.torchrun() as workers:
            ...         actor = Actor("config:tiny-llama", workers.pool(2))
            ...         ...  # straight-line code: runs once
            >>> if __name__ == "__main__":  # because ranks import this file
            ...     main()

        Args:
            timeout: for the start, and for each message between ranks.
            threads_per_rank: torch's threads in each process.

        Raises:
            ConfigError: if torchrun's variables are not set, or the job has a controller already.
            RankFailure: if a rank does not start.
            SystemExit: with status 0, in every process but rank 0's, when the controller closes.
        """
        from hybridflow.workers.engines.torchrun import TorchrunEngine
        from hybridflow.workers.engines.torchrun_rank import Member, serve

        member = Member.from_environment()
        if member.rank:
            serve(member, timeout, threads_per_rank)
            raise SystemExit(0)
        return Workers(TorchrunEngine(member, timeout=timeout, threads_per_rank=threads_per_rank))

    @staticmethod
    def ray(
        address: str | None = None,
        num_ranks: int | None = None,
        *,
        cpus_per_rank: float = 1,
        gpus_per_rank: float | None = None,
        timeout: timedelta = timedelta(minutes=5),
        threads_per_rank: int = 1,
        env: Mapping[str, str] | None = None,
    ) -> Workers:
        """Actors of Ray, on one machine or many.

        Args:
            address: of a running cluster, or "auto" to find it; when None, Ray is started here
                unless a cluster is found. Ignored if this process has initialised Ray already.
            num_ranks: number of actors; when None, as many as the resources allow.
            cpus_per_rank: CPUs reserved for each rank.
            gpus_per_rank: GPUs reserved for each rank; when None, one if there are enough, else
                none. Ranks with a GPU of their own communicate by NCCL, others by gloo.
            timeout: for the start, and for each message between ranks.
            threads_per_rank: torch's threads in each actor.
            env: environment variables set in each actor.

        Raises:
            ConfigError: if Ray is not installed or lacks the resources; names wanted and free ones.
            RankFailure: if an actor does not start.
        """
        try:
            from hybridflow.workers.engines.ray import RayEngine
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] != "ray":
                raise
            raise ConfigError(
                "Workers.ray needs Ray, which is not installed; run: pip install 'ray>=2.50', or "
                "use Workers.local, which does not need Ray"
            ) from error

        return Workers(
            RayEngine(
                address, num_ranks, cpus_per_rank=cpus_per_rank, gpus_per_rank=gpus_per_rank,
                timeout=timeout, threads_per_rank=threads_per_rank, env=env,
            )
        )  # fmt: skip

    def __enter__(self) -> Workers:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def num_ranks(self) -> int:
        """Number of ranks in all."""
        return self.engine.num_ranks

    def pool(self, num_ranks: int) -> ResourcePool:
        """Reserves free ranks; models on the same pool share its devices.

        Raises:
            ConfigError: if fewer ranks are free.
        """
        if not 1 <= num_ranks <= len(self._free):
            raise ConfigError(
                f"pool: expected at least 1 rank and at most the {len(self._free)} free of "
                f"{self.num_ranks}, got {num_ranks}; start more workers, or colocate models by "
                f"giving them one pool"
            )
        ranks, self._free = self._free[:num_ranks], self._free[num_ranks:]
        return ResourcePool(self, tuple(ranks))

    def clear(self) -> None:
        """Removes all groups once their calls are done, and frees all ranks.

        A notebook can then place other models on the running processes.

        Raises:
            RankFailure: if a worker's `close` raises, or a rank has died.
        """
        for group in list(self.groups):
            group.remove()
        self._names.clear()
        self._free = list(range(self.num_ranks))

    def name(self, wanted: str) -> str:
        """A name that no group has yet."""
        names = itertools.chain([wanted], (f"{wanted}-{k}" for k in itertools.count(2)))
        name = next(name for name in names if name not in self._names)
        self._names.add(name)
        return name

    def call(self, route: MethodRoute, args: tuple, kwargs: dict[str, Any]) -> Future:
        """Sends a call to a group's ranks, once its inputs are done; see `WorkerGroup.call`."""
        future = Future(route.name, self._wait)
        call = Call(
            number=next(self._numbers), route=route, args=args, kwargs=kwargs, future=future
        )
        with self._lock:
            self._refuse_if_closed()
            self._waiting.append(call)
            self._forward()
            if self._waiting and self._forwarder is None:
                self._forwarder = threading.Thread(target=self._keep_forwarding, daemon=True)
                self._forwarder.start()
        return future

    def take_spans(self) -> list[Span]:
        """Returns and forgets the calls that ranks have run, at most the last 10,000."""
        with self._lock:
            found = [Span(*span) for span in self._spans]
            self._spans.clear()
        return found

    def wait_any(self, futures: Sequence[Future | Joined]) -> None:
        """Waits until one of the futures is done, or has failed."""
        while not self._step(None, lambda: any(future.is_done for future in futures)):
            pass

    def close(self) -> None:
        """Ends the ranks; calls in progress fail."""
        with self._lock:
            if not self._is_open:
                return
            self._is_open = False
            busy = bool(self._calls)
            self._fail(ConfigError("the workers were closed before this call was answered"))
        self.engine.close(is_failed=busy)

    def _refuse_if_closed(self) -> None:
        if self._failure is not None:
            raise self._failure
        if not self._is_open:
            raise ConfigError(
                "these workers were closed, and results not read before are lost; start new ones"
            )

    def _wait(self, future: Future, timeout_s: float | None) -> None:
        """Waits until a future is done, receiving replies unless another thread does."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not self._step(deadline, lambda: future.is_done):
            if deadline is not None and time.monotonic() >= deadline:
                raise TimeoutError(f"{future.name} has not answered within {timeout_s:g} s")
        if future.error is not None:
            raise future.error
        # A rank's results are lost when the rank ends.
        self._refuse_if_closed()

    def _keep_forwarding(self) -> None:
        while True:
            self._step(None, lambda: not self._waiting)
            with self._lock:
                # Under the lock, so that a call queued now either keeps this thread or starts one.
                if not self._waiting:
                    self._forwarder = None
                    return

    def _step(self, deadline: float | None, is_enough: Any) -> bool:
        """Receives replies unless `is_enough()` already; returns `is_enough()` afterwards."""
        with self._lock:
            if is_enough():
                return True
            limit_s = self._limit_s(deadline)
            if self._is_receiving:
                self._answers.wait(limit_s)
                return bool(is_enough())
            self._is_receiving = True
        replies, failure, is_there = [], None, False
        try:
            replies = self.engine.receive(limit_s)
        except RankFailure as error:
            failure = error
        finally:
            with self._lock:
                self._is_receiving = False
                for reply in replies:
                    self._take(reply)
                self._cancel_stuck()
                if failure is not None:
                    self._fail(failure)
                self._forward()
                self._answers.notify_all()
                is_there = bool(is_enough())
        if failure is not None:
            self.engine.close(is_failed=True)
        return is_there

    def _limit_s(self, deadline: float | None) -> float | None:
        limits = [deadline] if deadline is not None else []
        limits += [call.failed_at + CANCEL_S for call in self._calls.values() if call.failed_at]
        return max(0.0, min(limits) - time.monotonic()) if limits else None

    def _forward(self) -> None:
        """Sends each queued call that has its inputs, whose ranks are neither full nor blocked.

        An earlier call that stays queued blocks its ranks, which keeps their calls in order.
        """
        if not self._waiting:
            return
        blocked: set[int] = set()
        waiting, self._waiting = self._waiting, deque()
        for call in waiting:
            inputs, asked = call.inputs(), call.route.asked
            is_full = any(self._unanswered[rank] >= _MOST_UNANSWERED for rank in asked)
            is_ready = all(source.is_done for source in inputs) and not is_full
            if not is_ready or not blocked.isdisjoint(asked):
                blocked.update(asked)
                self._waiting.append(call)
                continue
            failed = next((source.error for source in inputs if source.error), None)
            try:
                if failed is not None:
                    raise failed
                self._send(call)
            except Exception as error:  # noqa: BLE001 - raised where the answer is asked for
                self._calls.pop(call.number, None)
                call.future.error, call.future.is_done = error, True
                if isinstance(error, RankFailure) and failed is None:
                    self._fail(error)

    def _send(self, call: Call) -> None:
        tasks = call.tasks(self.engine.store)
        self._calls[call.number] = call
        for rank, task in tasks:
            self._unanswered[rank] += 1
            self.engine.submit(rank, task)

    def _take(self, reply: Reply) -> None:
        self._unanswered[reply.rank] -= 1
        call = self._calls.get(reply.call)
        if call is None:
            return
        call.replies[reply.rank] = reply
        now = time.perf_counter()
        self._spans.append((reply.call, call.route.name, reply.rank, now - reply.seconds, now))
        if reply.failure is not None and not call.failed_at:
            call.failed_at = time.monotonic()
        if len(call.replies) == len(call.route.asked):
            del self._calls[call.number]
            call.finish(self.engine.store)

    def _cancel_stuck(self) -> None:
        """Ends all ranks if some do not answer after another rank of their call has raised."""
        now = time.monotonic()
        for call in list(self._calls.values()):
            if call.failed_at and now >= call.failed_at + CANCEL_S:
                self._fail(call.failure())
                threading.Thread(target=self.engine.close, args=(True,), daemon=True).start()
                return

    def _fail(self, error: BaseException) -> None:
        """Fails all calls in progress with one error."""
        if self._failure is None and self._is_open:
            self._failure = error
        for call in (*self._calls.values(), *self._waiting):
            call.future.error, call.future.is_done = error, True
        self._calls.clear()
        self._waiting.clear()
