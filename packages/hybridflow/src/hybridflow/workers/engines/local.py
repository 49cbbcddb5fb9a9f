"""Workers as processes of this machine: pipes carry calls, shared memory carries tensors.

The processes are ranks of a `RankPool`: they have process groups, end with their parent, and are
stopped when one fails. Each serves calls on its own socket until the controller stops it.
"""

from __future__ import annotations

import os
import pickle
import select
import signal
import socket
import struct
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

from hybridflow.workers.engines.rank import RankExecutor, RankTask, Reply
from hybridflow.workers.engines.shared_memory import SharedMemory, make_folder
from shared.comms.group import Group
from shared.comms.launch import RankPool
from shared.errors import RankFailure
from shared.process_mark import remove_marked_folder

__all__ = ["READ_BYTES", "LocalEngine", "StreamLink"]

_FOREVER = timedelta(days=20)  # near the longest timeout of poll
_SIZE = struct.Struct("<Q")
_END_S = 5.0
"""Seconds that a process may take to end once it has closed its connection."""
READ_BYTES = 1 << 16
"""Most bytes that one system call reads."""


class StreamLink:
    """A connection on which a small message takes one system call to send, and one to receive."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._rest = bytearray()

    def fileno(self) -> int:
        """The descriptor to poll."""
        return self._socket.fileno()

    def send(self, message: Any) -> None:
        """Sends a message; raises OSError if the other side has closed."""
        data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        self._socket.sendall(_SIZE.pack(len(data)) + data)

    def receive(self) -> list[Any]:
        """Waits for a message; returns all that were read, as poll would not report those again."""
        found: list[Any] = []
        while not found:
            more = self._socket.recv(READ_BYTES)
            if not more:
                raise EOFError("the other side closed the connection")
            self._rest += more
            while len(self._rest) >= _SIZE.size:
                stop = _SIZE.size + _SIZE.unpack_from(self._rest)[0]
                if len(self._rest) < stop:
                    break
                found.append(pickle.loads(self._rest[_SIZE.size : stop]))
                del self._rest[:stop]
        return found

    def close(self) -> None:
        """Closes the connection."""
        self._socket.close()


class LocalEngine:
    """Processes of this machine, one per rank."""

    name = "local"

    def __init__(
        self,
        num_ranks: int,
        *,
        timeout: timedelta = timedelta(minutes=5),
        threads_per_rank: int = 1,
        env: Mapping[str, str] | None = None,
    ) -> None:
        """Starts the processes.

        Args:
            num_ranks: number of processes.
            timeout: for the start, and for each message between ranks.
            threads_per_rank: torch's threads in each process.
            env: environment variables set in each process.

        Raises:
            RankFailure: if a process does not start.
        """
        self.num_ranks = num_ranks
        self._folder = make_folder()
        self.store = SharedMemory(self._folder, "controller", is_keeper=True)
        self._pool = RankPool(
            num_ranks, timeout=timeout, threads_per_rank=threads_per_rank, env=env
        )
        self._links: list[StreamLink] = []
        self._is_open = True
        self._failure: BaseException | None = None
        try:
            self._pool.__enter__()
        except BaseException:
            remove_marked_folder(self._folder)
            raise
        self._runner = threading.Thread(target=self._run, name="hybridflow-ranks", daemon=True)
        self._poll = select.poll()
        try:
            self._connect()
        except BaseException:
            self.close(is_failed=True)
            raise
        self._rank_of = {link.fileno(): rank for rank, link in enumerate(self._links)}

    def _connect(self) -> None:
        address = str(self._folder / "controller.sock")
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(address)
            listener.listen(self.num_ranks)
            # The pool reports a process that fails before it connects; no connection does.
            listener.settimeout(0.2)
            self._address = address
            self._runner.start()
            links: dict[int, StreamLink] = {}
            while len(links) < self.num_ranks:
                try:
                    link = StreamLink(listener.accept()[0])
                except TimeoutError:
                    if not self._runner.is_alive():
                        raise self._failure or RankFailure("the ranks ended at once") from None
                else:
                    links[link.receive()[0]] = link
        self._links = [links[rank] for rank in range(self.num_ranks)]
        for link in self._links:
            self._poll.register(link.fileno(), select.POLLIN | select.POLLHUP)

    def _run(self) -> None:
        try:
            self._pool.run(_serve, self._address, str(self._folder), timeout=_FOREVER)
        except BaseException as error:  # noqa: BLE001 - raised where a reply is awaited
            self._failure = error

    @property
    def pids(self) -> list[int]:
        """Process ids, by rank."""
        return self._pool.pids

    def submit(self, rank: int, task: RankTask) -> None:
        """Sends a task.

        Raises:
            RankFailure: if the process has ended.
        """
        try:
            # A plain tuple is pickled several times faster than a named one.
            self._links[rank].send(tuple(task))
        except OSError as error:
            raise self._death(rank) from error

    def receive(self, timeout_s: float | None) -> list[Reply]:
        """Waits for replies; returns none on timeout.

        Raises:
            RankFailure: if a process has ended.
        """
        ready = self._poll.poll(None if timeout_s is None else 1000 * timeout_s)
        replies = []
        for fd, _ in ready:
            rank = self._rank_of[fd]
            try:
                found = [Reply(*reply) for reply in self._links[rank].receive()]
            except (EOFError, OSError) as error:
                raise self._death(rank) from error
            for reply in found:
                if reply.handle is not None:
                    self.store.adopt(reply.handle)
            replies += found
        return replies

    def _death(self, rank: int) -> RankFailure:
        how = "it closed its connection"
        with suppress(IndexError):  # the pool has stopped all ranks by now
            # A process closes its connections shortly before its end can be observed.
            deadline = time.monotonic() + _END_S
            while (code := self._pool.exit_code(rank)) is None and time.monotonic() < deadline:
                time.sleep(0.002)
            if code is not None:
                how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exited: {code}"
        return RankFailure(
            f"rank {rank} of {self.num_ranks} died: {how}. Start again from the last checkpoint",
            rank=rank,
        )

    def close(self, is_failed: bool = False) -> None:
        """Ends the processes, at once where one has failed."""
        if not self._is_open:
            return
        self._is_open = False
        if is_failed:
            for pid in self._pool.pids:
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(pid, signal.SIGKILL)
        for link in self._links:
            with suppress(OSError):
                link.send(None)
        if self._runner.is_alive():
            self._runner.join(10)
        self._pool.__exit__(None, None, None)
        for link in self._links:
            link.close()
        remove_marked_folder(self._folder)


def _serve(address: str, folder: str) -> None:
    """Serves calls on one rank until the controller sends None."""
    rank = Group.world().rank
    executor = RankExecutor(SharedMemory(Path(folder), f"rank{rank}"), rank)
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(address)
        link = StreamLink(connection)
        link.send(rank)
        while True:
            for task in link.receive():
                if task is None:
                    return
                link.send(tuple(executor.run(RankTask(*task))))
