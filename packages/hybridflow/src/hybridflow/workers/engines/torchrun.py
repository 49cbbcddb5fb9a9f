"""Workers as the processes of a torchrun job, on one machine or many.

The controller runs in torchrun's process of global rank 0, and that rank in a child process: so
every rank has its GPU, random state and interpreter to itself, and can be killed while it waits for
others. The other processes are ranks themselves. All find one another through torchrun's store,
which also distributes the key that every connection requires.
"""

from __future__ import annotations

import atexit
import json
import os
import secrets
import select
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from datetime import timedelta

from hybridflow.workers.engines.rank import RankTask, Reply
from hybridflow.workers.engines.tcp import Listener, PeerLink, connect
from hybridflow.workers.engines.torchrun_rank import Member, meeting_place
from hybridflow.workers.engines.torchrun_store import CONTROLLER, PlacedStore, StoreAddress
from shared.comms.launch import KEEP_MEMORY
from shared.errors import CommError, ConfigError, RankFailure

__all__ = ["TorchrunEngine"]

_LOOK_AGAIN_S = 0.02
_END_S = 10.0
"""Seconds that ranks may take to end once they are asked to."""


class TorchrunEngine:
    """The processes of a torchrun job, one per rank."""

    name = "torchrun"

    def __init__(self, member: Member, *, timeout: timedelta, threads_per_rank: int = 1) -> None:
        """Starts rank 0 and finds the others.

        Args:
            member: this process, torchrun's rank 0.
            timeout: for the start, and for each message between ranks.
            threads_per_rank: torch's threads in rank 0; the other processes set their own.

        Raises:
            ConfigError: if the job has had a controller already.
            RankFailure: if a rank does not start.
        """
        self.num_ranks = member.num_ranks
        # If torchrun's agent hosts no store, this process does, as long as this reference lives.
        self._meeting_place = meeting_place(timeout)
        if self._meeting_place.add("controllers", 1) > 1:
            raise ConfigError(
                "expected one controller, got a second Workers.torchrun() in this job; a script "
                "calls it once, and under `if __name__ == '__main__':` where it defines what its "
                "workers run"
            )
        self._key = secrets.token_bytes(32)
        self.store = PlacedStore(CONTROLLER, self._key)
        self._meeting_place.set("key", self._key.hex())
        self._listener = Listener(member.listening_address(), self._key, self._answer)
        self._calls: list[PeerLink] = []
        self._lives: list[PeerLink] = []
        self._is_open = True
        atexit.register(self.close)
        self._first = _started(timeout, threads_per_rank)
        try:
            self._meet(member, timeout)
        except BaseException:
            self.close(is_failed=True)
            raise
        self._rank_of = {link.fileno(): rank for rank, link in enumerate(self._calls)}
        self._poll = select.poll()
        for link in self._calls:
            self._poll.register(link.fileno(), select.POLLIN)
        threading.Thread(target=self._forget, name="hybridflow-forget", daemon=True).start()

    def _meet(self, member: Member, timeout: timedelta) -> None:
        deadline = time.monotonic() + timeout.total_seconds()
        found = [self._place(rank, deadline) for rank in range(self.num_ranks)]
        self.store.places = {
            CONTROLLER: member.place(self._listener.port, self.store.folder),
            **{rank: place for rank, (place, _) in enumerate(found)},
        }
        backend = "nccl" if all(has_gpu for _, has_gpu in found) else "gloo"
        world = {"places": self.store.places, "backend": backend}
        self._meeting_place.set("world", json.dumps(world))
        for rank, (place, _) in enumerate(found):
            try:
                for links, purpose in ((self._lives, "life"), (self._calls, "calls")):
                    limit_s = max(1.0, deadline - time.monotonic())
                    links.append(connect((place.host, place.port), self._key, limit_s))
                    links[-1].send(purpose)
            except (CommError, EOFError, OSError) as error:
                raise self._absence(rank, error) from error
        for rank, link in enumerate(self._calls):
            try:
                link.limit(max(1.0, deadline - time.monotonic()))
                link.receive()  # the message "ready"
                link.limit(None)
            except (EOFError, OSError) as error:
                raise self._absence(rank, error) from error

    def _place(self, rank: int, deadline: float) -> tuple[StoreAddress, bool]:
        """Waits for a rank to start; returns its address, and whether it has its own GPU."""
        name = f"place/{rank}"
        while not self._meeting_place.check([name]):
            if self._first.poll() is not None:
                raise self._absence(0, f"it exited: {self._first.returncode}")
            if time.monotonic() > deadline:
                raise self._absence(rank, "no sign of it")
            time.sleep(_LOOK_AGAIN_S)
        place, has_gpu = json.loads(self._meeting_place.get(name))
        return StoreAddress(*place), has_gpu

    def _absence(self, rank: int, how: object) -> RankFailure:
        return RankFailure(
            f"rank {rank} of {self.num_ranks} did not come up ({how}); look at its own output, "
            f"and raise the timeout if it is slow to call Workers.torchrun()",
            rank=rank,
        )

    def _answer(self, link: PeerLink) -> None:
        if link.receive() == "values":
            self.store.serve(link)

    def _forget(self) -> None:
        for owner, packed in iter(self.store.gone.get, None):
            with suppress(OSError):
                self._lives[owner].send(packed)

    def submit(self, rank: int, task: RankTask) -> None:
        """Sends a task.

        Raises:
            RankFailure: if the process has ended.
        """
        try:
            self._calls[rank].send(task)
        except OSError as error:
            raise self._death(rank, error) from error

    def receive(self, timeout_s: float | None) -> list[Reply]:
        """Waits for replies; returns none on timeout.

        Raises:
            RankFailure: if a process has ended.
        """
        replies = []
        for fd, _ in self._poll.poll(None if timeout_s is None else 1000 * timeout_s):
            rank = self._rank_of[fd]
            try:
                reply = self._calls[rank].receive()
            except (EOFError, OSError) as error:
                raise self._death(rank, error) from error
            if reply.handle is not None:
                self.store.adopt(reply.handle)
            replies.append(reply)
        return replies

    def _death(self, rank: int, how: Exception) -> RankFailure:
        return RankFailure(
            f"rank {rank} of {self.num_ranks} died: {how}. Its own output, or torchrun's report, "
            f"tells why; start again from the last checkpoint",
            rank=rank,
        )

    def close(self, is_failed: bool = False) -> None:
        """Ends the ranks, at once where one has failed."""
        if not self._is_open:
            return
        self._is_open = False
        atexit.unregister(self.close)
        links = self._lives if is_failed else self._calls
        for link in links:
            with suppress(OSError):
                link.send(None)
        deadline = time.monotonic() + _END_S
        for link in links:
            _await_end(link, deadline)
        for link in (*self._calls, *self._lives):
            link.close()
        self.store.gone.put(None)
        self._listener.close()
        with suppress(subprocess.TimeoutExpired):
            self._first.wait(0 if is_failed else max(0.0, deadline - time.monotonic()))
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._first.pid, signal.SIGKILL)  # the group, as it may have left children
        self._first.wait()
        self.store.remove()


def _started(timeout: timedelta, threads_per_rank: int) -> subprocess.Popen[bytes]:
    """Starts rank 0's process, which inherits torchrun's variables."""
    env = {
        **KEEP_MEMORY,
        **os.environ,
        # The rank can import whatever this process can, though it runs another script.
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        # The rank connects to the store, which exists already, instead of hosting one.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    command = (sys.executable, "-P", "-m", "hybridflow.workers.engines.torchrun_rank")
    return subprocess.Popen(
        [*command, str(timeout.total_seconds()), str(threads_per_rank)],
        env=env,
        stdin=subprocess.DEVNULL,
        # Torchrun's signal to its process group does not reach the rank, which ends when the
        # controller does, and so has time to remove its shared memory.
        start_new_session=True,
    )


def _await_end(link: PeerLink, deadline: float) -> None:
    """Waits until the other side has closed a connection."""
    with suppress(EOFError, OSError):
        while True:
            link.limit(max(0.01, deadline - time.monotonic()))
            link.receive()  # a late reply, dropped
