"""One rank of a torchrun job: its process serves calls until the controller stops it.

The controller opens two connections to each rank. One carries calls, which the main thread runs.
The other shows that the controller is alive: when it closes, the process ends, whatever its main
thread is waiting for. It also carries the handles of values to remove.
"""

from __future__ import annotations

import ipaddress
import json
import os
import queue
import signal
import socket
import sys
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch

from hybridflow.workers.engines.rank import RankExecutor
from hybridflow.workers.engines.tcp import Listener, PeerLink
from hybridflow.workers.engines.torchrun_store import PlacedStore, StoreAddress
from shared.comms.init import join, leave, open_torchrun_store
from shared.errors import ConfigError, RankFailure

__all__ = ["Member", "meeting_place", "serve"]

_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A process that torchrun started.

    Attributes:
        rank: global rank.
        num_ranks: number of ranks in all.
        local_rank: rank on its machine.
        num_local_ranks: number of ranks on its machine.
        first_host: name or address of rank 0's machine.
    """

    rank: int
    num_ranks: int
    local_rank: int
    num_local_ranks: int
    first_host: str

    @staticmethod
    def from_environment() -> Member:
        """This process, by torchrun's environment variables.

        Raises:
            ConfigError: if torchrun did not start this process.
        """
        missing = [name for name in _VARIABLES if name not in os.environ]
        if missing:
            raise ConfigError(
                f"expected torchrun's environment, got {', '.join(missing)} unset; start the "
                f"script as `torchrun --nproc-per-node 2 train.py`, or use Workers.local(2), "
                f"which starts processes itself"
            )
        *numbers, host, _ = (os.environ[name] for name in _VARIABLES)
        rank, num_ranks, local_rank, num_local_ranks = map(int, numbers)
        return Member(
            rank=rank, num_ranks=num_ranks, local_rank=local_rank,
            num_local_ranks=num_local_ranks, first_host=host,
        )  # fmt: skip

    @property
    def machine(self) -> int:
        """Rank of the first process on this machine, which identifies the machine."""
        return self.rank - self.local_rank

    @property
    def has_gpu(self) -> bool:
        """Whether this machine has a GPU for each of its ranks."""
        return torch.cuda.is_available() and torch.cuda.device_count() >= self.num_local_ranks

    def place(self, port: int, folder: str) -> StoreAddress:
        """Where other processes reach this one's values."""
        return StoreAddress(self.machine, self._host(), port, folder)

    def listening_address(self) -> str:
        """The address of this machine that the others reach it by; "" if it does not know that one.

        It may not on rank 0's machine, whose name can mean another address there than elsewhere.
        """
        found = socket.getaddrinfo(self._host(), 0, type=socket.SOCK_STREAM)[0]
        address = str(found[4][0])
        is_alone = self.num_ranks == self.num_local_ranks
        if ipaddress.ip_address(address.partition("%")[0]).is_loopback and not is_alone:
            return ""
        with socket.socket(found[0], socket.SOCK_STREAM) as probe:
            try:
                probe.bind((address, 0))
            except OSError:
                return ""
        return address

    def _host(self) -> str:
        # All reach rank 0's machine by this name, which may resolve otherwise on itself.
        if self.machine == 0:
            return self.first_host
        family, kind, _, _, address = socket.getaddrinfo(
            self.first_host, 9, type=socket.SOCK_DGRAM
        )[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # sends nothing, but selects the outgoing interface
            return str(probe.getsockname()[0])


def meeting_place(timeout: timedelta) -> Any:
    """The store through which the job's processes exchange addresses and the key.

    Raises:
        RankFailure: if it cannot be reached, or not all processes join within the timeout.
    """
    try:
        return open_torchrun_store("hybridflow", timeout)
    except RuntimeError as error:
        raise RankFailure(
            f"the processes of torchrun's job did not meet within {timeout.total_seconds():g} s "
            f"({str(error).splitlines()[0]}); each has to call Workers.torchrun(), and to reach "
            f"MASTER_ADDR {os.environ['MASTER_ADDR']} at port {os.environ['MASTER_PORT']}"
        ) from error


def serve(member: Member, timeout: timedelta, threads_per_rank: int) -> None:
    """Runs this process as a rank until the controller stops it, or ends.

    Raises:
        RankFailure: if there is no controller within the timeout.
    """
    torch.set_num_threads(threads_per_rank)
    store = meeting_place(timeout)
    rank = _Rank(member, bytes.fromhex(_left(store, "key", timeout)))
    signal.signal(signal.SIGTERM, lambda *_: rank.end(128 + signal.SIGTERM))
    rank.serve(store, timeout)


class _Rank:
    def __init__(self, member: Member, key: bytes) -> None:
        self._member = member
        self._values = PlacedStore(member.rank, key)
        self._calls: queue.SimpleQueue[PeerLink] = queue.SimpleQueue()
        self._is_stopping = False
        self._listener = Listener(member.listening_address(), key, self._answer)

    def serve(self, store: Any, timeout: timedelta) -> None:
        member, values = self._member, self._values
        try:
            place = member.place(self._listener.port, values.folder)
            store.set(f"place/{member.rank}", json.dumps([place, member.has_gpu]))
            world = json.loads(_left(store, "world", timeout))
            values.places = {
                int(owner): StoreAddress(*found) for owner, found in world["places"].items()
            }
            self._join(store, world["backend"], timeout)
            calls = self._calls.get(timeout=timeout.total_seconds())
            self._run(calls)
            leave()
        finally:
            values.remove()
            self._listener.close()
        calls.close()  # shows the controller that this rank has ended

    def _run(self, calls: PeerLink) -> None:
        executor = RankExecutor(self._values, self._member.rank)
        try:
            calls.send("ready")
            while (task := calls.receive()) is not None:
                calls.send(executor.run(task))
        except (EOFError, OSError):
            self.end(1)  # the controller is gone
        # From here on a closed connection is part of an orderly stop.
        self._is_stopping = True

    def _join(self, store: Any, backend: str, timeout: timedelta) -> None:
        member = self._member
        is_one_machine = len({place.machine for place in self._values.places.values()}) == 1
        if backend == "nccl":
            torch.cuda.set_device(member.local_rank)
        elif is_one_machine and sys.platform == "linux":
            # The host's name may resolve to an address that no interface has.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        join(member.rank, member.num_ranks, store, backend=backend, timeout=timeout)

    def _answer(self, link: PeerLink) -> None:
        purpose = link.receive()
        if purpose == "calls":
            self._calls.put(link)
        elif purpose == "life":
            self._live_by(link)
        else:
            self._values.serve(link)

    def _live_by(self, link: PeerLink) -> None:
        code = 1
        with suppress(EOFError, OSError):
            while (packed := link.receive()) is not None:
                self._values.forget(packed)
            code = 0  # the controller asked this rank to end, and reports any failure itself
        if not self._is_stopping:
            self.end(code)

    def end(self, code: int) -> None:
        """Ends the process now, whatever it is doing."""
        self._values.remove()
        with suppress(OSError, RuntimeError):  # interrupted while writing, or the pipe is closed
            sys.stdout.flush()
        os._exit(code)


def _left(store: Any, name: str, timeout: timedelta) -> str:
    """Waits for a key that the controller sets in the store."""
    try:
        return store.get(name).decode()
    except RuntimeError as error:
        raise RankFailure(
            f"rank 0 did not call Workers.torchrun() within {timeout.total_seconds():g} s, or "
            f"has ended; read its output, or raise the timeout if it is slow to start"
        ) from error


if __name__ == "__main__":
    serve(Member.from_environment(), timedelta(seconds=float(sys.argv[1])), int(sys.argv[2]))
