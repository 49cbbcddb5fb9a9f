"""Workers as Ray's actors, one a rank, on one machine or many.

A placement group reserves the ranks' resources. A call is one Ray task on each rank, and its reply
one object; tensors stay in the object store of the machine that made them until a rank reads them
(see `ray_store`). Actors find one another through a TCPStore on rank 0, and form one world of
process groups.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, NamedTuple

import ray
import torch
from ray.exceptions import RayActorError, RayError
from ray.util.placement_group import PlacementGroup, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from hybridflow.workers.engines.rank import RankExecutor, RankTask, Reply
from hybridflow.workers.engines.ray_placement import place_ranks
from hybridflow.workers.engines.ray_store import RayStore, read, written
from shared.comms.init import join, open_store
from shared.comms.launch import KEEP_MEMORY
from shared.errors import RankFailure

__all__ = ["RayEngine"]

_LOOK_AGAIN_S = 0.01
"""Seconds of one wait; `ray.wait` does not see what another thread submits meanwhile."""


class RayEngine:
    """Ray actors, one per rank."""

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
            ConfigError: if Ray has fewer resources than the ranks need, or too few are free.
            RankFailure: if an actor does not start.
        """
        self._is_ours = not ray.is_initialized()
        self._actors: list[Any] = []
        self._group: PlacementGroup | None = None
        self._under_way: dict[ray.ObjectRef, tuple[int, int]] = {}  # call and rank
        self._is_open = True
        if self._is_ours:
            ray.init(address, include_dashboard=False)
        try:
            places = place_ranks(num_ranks, cpus_per_rank, gpus_per_rank)
            self._group = places.group
            self.num_ranks = len(places.order)
            self.store = RayStore()
            self._actors = [
                ray.remote(_Rank)
                .options(
                    num_cpus=places.cpus,
                    num_gpus=places.gpus,
                    runtime_env={"env_vars": {**KEEP_MEMORY, **(env or {})}},
                    enable_task_events=False,  # task events take a tenth of a small call's time
                    scheduling_strategy=PlacementGroupSchedulingStrategy(
                        places.group, placement_group_bundle_index=place
                    ),
                )
                .remote(rank, threads_per_rank)
                for rank, place in enumerate(places.order)
            ]
            self._run = [actor.run for actor in self._actors]
            self._connect("nccl" if places.gpus >= 1 else "gloo", timeout)
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
                f"Ray's actors did not form {self.num_ranks} ranks within {limit_s:g} s: {error}"
            ) from error

    def submit(self, rank: int, task: RankTask) -> None:
        """Sends a task."""
        # A plain tuple is pickled several times faster than a named one.
        data, refs = written(tuple(task))
        run = self._run[rank].remote
        reply = run(data, refs) if refs else run(data)
        self._under_way[reply] = task.call, rank

    def receive(self, timeout_s: float | None) -> list[Reply]:
        """Waits for replies; may return none, after `timeout_s` or `_LOOK_AGAIN_S`.

        Raises:
            RankFailure: if an actor has ended.
        """
        under_way = self._under_way.copy()  # because other threads add to it
        waited_for = list(under_way)
        if not waited_for or not self._is_open:
            return []
        limit_s = _LOOK_AGAIN_S if timeout_s is None else min(timeout_s, _LOOK_AGAIN_S)
        if len({call for call, _ in under_way.values()}) == 1:
            # Replies of one call arrive together and are cheapest to read together; failed and
            # slow ones are handled one by one below.
            with suppress(RayError):
                found = ray.get(waited_for, timeout=limit_s)
                for reply in waited_for:
                    del self._under_way[reply]
                return [_reply(data) for data in found]
            limit_s = 0.0
        ready, _ = ray.wait(waited_for, num_returns=1, timeout=limit_s)
        return [self._found(reply) for reply in ready]

    def _found(self, reply: ray.ObjectRef) -> Reply:
        _, rank = self._under_way.pop(reply)
        try:
            return _reply(ray.get(reply))
        except RayError as error:
            how = "died" if isinstance(error, RayActorError) else "cannot be reached"
            raise RankFailure(
                f"rank {rank} of {self.num_ranks} {how}: {error}. Start again from the last "
                f"checkpoint",
                rank=rank,
            ) from error

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
    """The world a rank joins: its size, its store's address, its backend, its timeout."""

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
        self._executor = RankExecutor(RayStore(), rank)
        self._store: Any = None
        torch.set_num_threads(num_threads)

    def machine(self) -> str:
        """Address of the machine this rank runs on."""
        return ray.util.get_node_ip_address()

    def open(self, timeout: timedelta) -> int:
        """Opens the store in which the ranks find one another; returns its port."""
        self._store = open_store(self.machine(), timeout)
        return self._store.port

    def join(self, world: _World) -> None:
        """Becomes a rank of the world."""
        if world.backend == "nccl":
            torch.cuda.set_device(0)  # Ray makes only its own GPUs visible to an actor
        elif world.is_one_machine and sys.platform == "linux":
            # The host's name may resolve to an address that no interface has.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        store = self._store or (world.host, world.port)
        join(self._rank, world.num_ranks, store, backend=world.backend, timeout=world.timeout)

    def run(
        self, data: bytes, refs: Sequence[ray.ObjectRef] = ()
    ) -> bytes | tuple[bytes, list[ray.ObjectRef]]:
        """Runs a task; task and reply are both encoded by `written`."""
        answer, kept = written(tuple(self._executor.run(RankTask(*read(data, refs)))))
        return (answer, kept) if kept else answer


def _reply(found: bytes | tuple[bytes, list[ray.ObjectRef]]) -> Reply:
    return Reply(*(read(found, ()) if isinstance(found, bytes) else read(*found)))
