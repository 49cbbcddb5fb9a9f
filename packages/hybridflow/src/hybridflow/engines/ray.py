"""Workers as Ray's actors, one a rank, on one machine or many.

A placement group holds the ranks' places. A call is one Ray task on each rank and its answer one
object, as in a plain fan-out; tensors stay in the object store of the machine that made them until
a rank reads them (see `ray_store`). Actors find one another through a store of torch's on rank 0,
and form one world of process groups.
"""

from __future__ import annotations

import os
import queue
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from datetime import timedelta
from typing import Any, NamedTuple

import ray
import torch
import torch.distributed as dist
from ray.exceptions import RayActorError, RayError
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table
from ray.util.placement_group import remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from hybridflow.engines.ray_store import RayStore, read, written
from hybridflow.engines.seat import Reply, Seat, Task
from shared.comms.courier import connect
from shared.comms.group import Group
from shared.errors import ConfigError, RankFailure

__all__ = ["RayEngine"]

_PLACING_S = 8.0
"""How long resources that others hold may take to become free."""


class RayEngine:
    """Some actors, one a rank."""

    name = "ray"

    def __init__(
        self,
        address: str | None = None,
        num_ranks: int | None = None,
        *,
        cpus_per_rank: float = 1,
        gpus_per_rank: float | None = None,
        timeout: timedelta = timedelta(minutes=5),
        threads_per_rank: int = 1,
        env: Mapping[str, str] | None = None,
    ) -> None:
        """Starts or finds Ray, and the actors in it; see `Workers.ray`.

        Raises:
            ConfigError: if Ray has fewer resources than the ranks want, or none that are free.
            RankFailure: if an actor does not come up.
        """
        self._is_ours = not ray.is_initialized()
        self._actors: list[Any] = []
        self._group: PlacementGroup | None = None
        self._answers: queue.SimpleQueue[tuple[int, Future]] = queue.SimpleQueue()
        self._is_open = True
        if self._is_ours:
            ray.init(address, include_dashboard=False)
        try:
            gpus = _gpus_per_rank(num_ranks) if gpus_per_rank is None else gpus_per_rank
            bundle = {"CPU": cpus_per_rank, "GPU": gpus}
            bundle = {name: number for name, number in bundle.items() if number > 0}
            self.num_ranks = _num_that_fit(bundle) if num_ranks is None else num_ranks
            self.store = RayStore()
            self._group = _placed(bundle, self.num_ranks)
            places = _by_machine(self._group)
            options = {"runtime_env": {"env_vars": dict(env)}} if env else {}
            self._actors = [
                ray.remote(_Rank)
                .options(
                    num_cpus=cpus_per_rank,
                    num_gpus=gpus,
                    scheduling_strategy=PlacementGroupSchedulingStrategy(
                        self._group, placement_group_bundle_index=place
                    ),
                    **options,
                )
                .remote(rank, threads_per_rank)
                for rank, place in enumerate(places)
            ]
            self._connect("nccl" if gpus >= 1 else "gloo", timeout)
        except BaseException:
            self.close(is_failed=True)
            raise

    def _connect(self, backend: str, timeout: timedelta) -> None:
        limit_s = timeout.total_seconds()
        try:
            machines = ray.get([actor.machine.remote() for actor in self._actors], timeout=limit_s)
            port = ray.get(self._actors[0].open.remote(timeout), timeout=limit_s)
            world = _World(
                self.num_ranks, machines[0], port, backend, len(set(machines)) == 1, timeout
            )
            ray.get([actor.join.remote(world) for actor in self._actors], timeout=limit_s)
        except RayError as error:
            raise RankFailure(
                f"Ray's actors did not come up as {self.num_ranks} ranks within {limit_s:g} s: "
                f"{error}"
            ) from error

    def submit(self, rank: int, task: Task) -> None:
        """Sends a task."""
        data, refs = written(task)
        run = self._actors[rank].run
        reply = run.remote(data, refs) if refs else run.remote(data)
        # Told by Ray rather than waited for: a wait would not see what is submitted meanwhile.
        reply.future().add_done_callback(lambda done: self._answers.put((rank, done)))

    def receive(self, timeout_s: float | None) -> list[Reply]:
        """Waits for replies; none when the time is up.

        Raises:
            RankFailure: if an actor has ended.
        """
        try:
            answers = [self._answers.get(timeout=timeout_s)]
        except queue.Empty:
            return []
        with suppress(queue.Empty):
            while True:
                answers.append(self._answers.get_nowait())
        return [self._reply(rank, answer) for rank, answer in answers]

    def _reply(self, rank: int, answer: Future) -> Reply:
        try:
            found = answer.result()
        except RayActorError as error:
            raise RankFailure(
                f"rank {rank} of {self.num_ranks} died: {error}. Start again from the last "
                f"checkpoint",
                rank=rank,
            ) from error
        return read(found, ()) if isinstance(found, bytes) else read(*found)

    def close(self, is_failed: bool = False) -> None:
        """Ends the actors, and Ray if it was started here."""
        if not self._is_open:
            return
        self._is_open = False
        for actor in self._actors:
            ray.kill(actor)
        if self._group is not None:
            remove_placement_group(self._group)
        if self._is_ours:
            ray.shutdown()


class _World(NamedTuple):
    """What a rank joins: how many, where their store is, and how they exchange messages."""

    num_ranks: int
    host: str
    port: int
    backend: str
    is_one_machine: bool
    timeout: timedelta


class _Rank:
    """The actor of one rank."""

    def __init__(self, rank: int, num_threads: int) -> None:
        self._rank = rank
        self._seat = Seat(RayStore(), rank)
        self._store: dist.TCPStore | None = None
        torch.set_num_threads(num_threads)

    def machine(self) -> str:
        """Where this rank runs."""
        return ray.util.get_node_ip_address()

    def open(self, timeout: timedelta) -> int:
        """Opens the store in which the ranks find one another, on a port that is free."""
        self._store = dist.TCPStore(
            self.machine(), 0, is_master=True, wait_for_workers=False, timeout=timeout
        )
        return self._store.port

    def join(self, world: _World) -> None:
        """Becomes a rank of the world."""
        store = self._store or dist.TCPStore(world.host, world.port, timeout=world.timeout)
        if world.backend == "nccl":
            torch.cuda.set_device(0)  # Ray shows an actor only its own
        elif world.is_one_machine and sys.platform == "linux":
            # The host's name may resolve to an address that is not there.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group(
            world.backend,
            store=store,
            rank=self._rank,
            world_size=world.num_ranks,
            timeout=world.timeout,
        )
        # Now, while all are there; who dies later is found by the closed connections.
        connect(Group.world())

    def run(
        self, data: bytes, refs: Sequence[ray.ObjectRef] = ()
    ) -> bytes | tuple[bytes, list[ray.ObjectRef]]:
        """Runs a task, and writes the reply as the task was written."""
        answer, kept = written(self._seat.run(read(data, refs)))
        return (answer, kept) if kept else answer


def _gpus_per_rank(num_ranks: int | None) -> int:
    num_gpus = ray.cluster_resources().get("GPU", 0)
    return int(num_gpus >= (1 if num_ranks is None else num_ranks))


def _num_that_fit(bundle: Mapping[str, float]) -> int:
    """How many such bundles all machines have resources for, used or not."""
    fit: Callable[[Mapping[str, float]], int] = lambda has: min(  # noqa: E731
        (int(has.get(name, 0) // number) for name, number in bundle.items()), default=1
    )
    return sum(fit(node["Resources"]) for node in ray.nodes() if node["Alive"])


def _placed(bundle: Mapping[str, float], num_ranks: int) -> PlacementGroup:
    """A place for each rank.

    Ray would wait without end for what is not there.
    """
    ...


def _by_machine(group: PlacementGroup) -> list[int]:
    """The group's bundles in an order in which those of one machine follow one another."""
    machine = placement_group_table(group)["bundles_to_node_id"]
    return sorted(machine, key=lambda place: (machine[place], place))
