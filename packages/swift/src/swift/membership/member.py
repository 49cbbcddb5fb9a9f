"""A rank's or spare's side of the membership: heartbeats, and worlds that come and go.

A thread listens to the supervisor. When a rank is lost it shuts down this process's connections, so
that a main thread that waits for a peer which hangs, or is cut off, raises and comes to
`next_world`.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

from shared.comms.init import sever
from shared.errors import ConfigError
from swift.membership.channel import ControlChannel

__all__ = ["Membership", "NewWorld", "StuckWatch"]

_SEVER_AGAIN_S = 0.02
_LEAST_CPU_S = 0.02
_MESSAGES = ("shared.comms.", "torch.distributed.")
"""Modules whose code waits for messages, ..."""
_WAITING = ("threading", "torch._ops")
"""... by these ones' means."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NewWorld:
    """A place in the ranks of one epoch.

    Attributes:
        epoch: its number, larger than those before.
        recovery: number of worlds before it.
        rank: this process's.
        world_size: number of ranks.
        store: host and port of the store to meet at.
        backend: "gloo" or "nccl".
        timeout_s: how long one message may take.
        lost: what was lost before: rank, how, and since when it had been silent or was gone, by this
            process's clock (`since_s`); the time that the message took is left out.
    """

    epoch: int
    recovery: int
    rank: int
    world_size: int
    store: tuple[str, int]
    backend: str
    timeout_s: float
    lost: tuple[dict[str, Any], ...]


class Membership:
    """This process's connection to its supervisor."""

    def __init__(
        self, channel: ControlChannel, *, rank: int | None, world_size: int, heartbeat_s: float
    ) -> None:
        """Starts the threads.

        Args:
            channel: to the supervisor.
            rank: the first one; None on a spare.
            world_size: the first one.
            heartbeat_s: silence after which the supervisor takes this process for lost.
        """
        self.rank = rank
        self.world_size = world_size
        self.epoch = -1
        self._channel = channel
        self._heartbeat_s = heartbeat_s
        self._changed = threading.Condition()
        self._announced = -1  # the newest epoch that the supervisor has begun
        self._world: NewWorld | None = None
        self._is_released = False
        self._step = 0
        self._is_new_world = False
        threading.Thread(target=self._listen, name="membership", daemon=True).start()
        threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()

    @staticmethod
    def of_process() -> Membership:
        """The connection that this process was started with.

        Raises:
            ConfigError: it was not started by `meshyard-swift run`.
        """
        if not _started:
            raise ConfigError(
                "expected a process of `meshyard-swift run -n 4 --spares 1 script.py`, got one that "
                "was started otherwise; start the script by it"
            )
        return _started[0]

    def serve(self) -> None:
        """Makes this the process's connection, which `of_process` returns."""
        _started[:] = [self]

    @property
    def is_released(self) -> bool:
        """Whether all ranks have done all steps."""
        return self._is_released

    def report_ready(self, fingerprint: dict[str, Any]) -> None:
        """Says that this process waits for a world."""
        self._channel.send({"kind": "ready", "fingerprint": fingerprint})

    def report_step(self, step: int) -> None:
        """Says how many steps are done: the first of a world at once, others by heartbeats."""
        self._step = step
        if self._is_new_world:
            self._is_new_world = False
            self._channel.send({"kind": "beat", "step": step, "epoch": self.epoch})

    def report_finished(self) -> None:
        """Says that all steps are done; `next_world` then waits for the others."""
        self._channel.send({"kind": "finished", "epoch": self.epoch})

    def report_failed(self, text: str) -> None:
        """Says why this process ends: the run prints it once, however many ranks fail alike."""
        self._channel.send({"kind": "failed", "text": text})

    def report_recovery(self, record: dict[str, Any]) -> None:
        """Sends what a recovery took, for the run's report."""
        self._channel.send({"kind": "recovery", "record": record})

    def next_world(self) -> NewWorld | None:
        """Waits for the next world; None when all ranks have done all steps.

        From here on the connections of the world before are not touched any more.
        """
        with self._changed:
            while not self._is_released:
                self.epoch = self._announced
                world, self._world = self._world, None
                if world is not None and world.epoch == self._announced:
                    self.rank, self.world_size = world.rank, world.world_size
                    self._is_new_world = True
                    _tell_rank(world)
                    return world
                self._changed.wait()
        return None

    def is_superseded(self, world: NewWorld, *, waits: bool) -> bool:
        """Whether a world follows this one.

        Args:
            world: this one.
            waits: gives the supervisor time to see that a rank is lost.
        """
        limit_s = 2 * self._heartbeat_s + 1 if waits else 0.0
        with self._changed:
            return self._changed.wait_for(lambda: self._announced > world.epoch, limit_s)

    def _beat(self) -> None:
        while True:
            self._channel.send({"kind": "beat", "step": self._step})
            time.sleep(self._heartbeat_s / 5)

    def _listen(self) -> None:
        for message in self._channel.messages():
            if message["kind"] in ("interrupt", "world"):
                self._announce(message)
            elif message["kind"] == "release":
                with self._changed:
                    self._is_released = True
                    self._changed.notify_all()
            elif message["kind"] == "stop":
                sys.stderr.write(f"{message['reason']}\n" if message["reason"] else "")
                sys.stderr.flush()
                os._exit(message["status"])
        os._exit(1)  # the supervisor has ended

    def _announce(self, message: dict[str, Any]) -> None:
        with self._changed:
            self._announced = message["epoch"]
            if message["kind"] == "world":
                fields = {key: value for key, value in message.items() if key != "kind"}
                fields["store"] = tuple(fields["store"])
                now_s = time.monotonic()
                fields["lost"] = tuple(
                    {**one, "since_s": now_s - one["ago_s"]} for one in fields["lost"]
                )
                self._world = NewWorld(**fields)
            self._changed.notify_all()
        threading.Thread(target=self._free, args=(message["epoch"],), daemon=True).start()

    def _free(self, epoch: int) -> None:
        """Frees the main thread from messages of earlier epochs, or ends the process."""
        watch = StuckWatch()
        while True:
            with self._changed:
                if self.epoch >= epoch:
                    return
                sever()
            time.sleep(_SEVER_AGAIN_S)
            watch.check()

    @contextmanager
    def leaving(self) -> Iterator[None]:
        """Ends the process if the block, which leaves a world, is stuck."""
        is_left = threading.Event()

        def watch_it() -> None:
            watch = StuckWatch()
            while not is_left.wait(_SEVER_AGAIN_S):
                watch.check()

        threading.Thread(target=watch_it, name="leaving", daemon=True).start()
        try:
            yield
        finally:
            is_left.set()


def _tell_rank(world: NewWorld) -> None:
    """Sets torchrun's variables where they have changed, as on a spare that becomes a rank."""
    for name, value in (("RANK", world.rank), ("WORLD_SIZE", world.world_size)):
        if os.environ.get(name) != str(value):
            os.environ[name] = str(value)


class StuckWatch:
    """Ends this process when its main thread has waited in a message of a broken world for seconds.

    Where torch does not let go of it, a spare takes the place, filled by replicas, and the run goes
    on. A main thread that waits elsewhere, as for data, comes back by itself.

    Attributes:
        limit_s: the seconds.
    """

    limit_s: ClassVar[float] = 5.0

    def __init__(self) -> None:
        ident = threading.main_thread().ident
        assert ident is not None, "the main thread runs"
        self._ident = ident
        self._clock = time.pthread_getcpuclockid(ident)
        self._cpu_s, self._since_s = time.clock_gettime(self._clock), time.monotonic()

    def check(self) -> None:
        """Looks at where the main thread is, and at its seconds of computing."""
        cpu_s, now_s = time.clock_gettime(self._clock), time.monotonic()
        if cpu_s - self._cpu_s > _LEAST_CPU_S or not self._is_in_message():
            self._cpu_s, self._since_s = cpu_s, now_s
        elif now_s - self._since_s > self.limit_s:
            sys.stderr.write(
                f"meshyard-swift: process {os.getpid()} was not free of lost ranks in {self.limit_s:g} s "
                f"and ends; a spare takes its place, filled from a replica or else a checkpoint\n"
            )
            sys.stderr.flush()
            os.kill(os.getpid(), signal.SIGKILL)

    def _is_in_message(self) -> bool:
        frame = sys._current_frames().get(self._ident)
        while frame is not None and frame.f_globals.get("__name__") in _WAITING:
            frame = frame.f_back
        name = "" if frame is None else str(frame.f_globals.get("__name__"))
        return name.startswith(_MESSAGES) and not name.startswith("torch.distributed.checkpoint")


_started: list[Membership] = []
