"""A vLLM or SGLang server as a node of the dataflow: one rank sends requests to it.

So a server can stand in for a `Rollout`, and generates while the other ranks work.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

from hybridflow.roles.actor import Actor, Generator
from hybridflow.roles.state.export import export
from hybridflow.rollout.rows import build_roll, prompt_rows, sample_ids, take_greedy
from hybridflow.rollout.sampling import Sampling
from hybridflow.rollout.servers.server import ServerRollout
from hybridflow.tasks.prompts import END_TOKENS
from hybridflow.workers.batch.batch import Batch
from hybridflow.workers.pool import ResourcePool
from hybridflow.workers.protocols import remote
from hybridflow.workers.worker import Worker
from shared.errors import ConfigError

__all__ = ["ServedRollout", "ServedWorker"]


class ServedWorker(Worker):
    """The rank that sends requests to a server."""

    def __init__(self, url: str, kind: str, **settings: Any) -> None:
        """Connects; arguments as `hybridflow.rollout.servers.server.ServerRollout`'s."""
        self.server = ServerRollout(url, kind=kind, **settings)
        self.version = 0

    @remote(protocol="rank-zero")
    def generate(self, batch: Batch, sampling: Sampling, step: int = 0) -> Batch:
        """Generates responses; see `Generator.generate`."""
        sampling = self.server.resolve(sampling, batch.meta.get(END_TOKENS, ()))
        ids = sample_ids(batch, sampling.num_samples)
        found = self.server.generate(prompt_rows(batch), sampling, sample_ids=ids, step=step)
        return build_roll(batch, found, sampling, self.version)

    @remote(protocol="rank-zero")
    def greedy(self, batch: Batch, sampling: Sampling, step: int = 0) -> Batch:
        """Generates greedy responses; see `Generator.greedy`."""
        return take_greedy(
            self.generate(batch, replace(sampling, temperature=0, num_samples=1), step)
        )

    @remote(protocol="rank-zero")
    def take(self, folder: str, version: int) -> None:
        """Has the server load weights."""
        # Counts on from the server's own version, as its initial label may equal any of ours.
        self.server.sync_weights(folder, (self.server.version or 0) + 1)
        self.version = version


class ServedRollout(Generator):
    """A rollout whose responses come from a server.

    Attributes:
        version: of its weights, in optimizer steps of the actor; 0 before the first sync.
    """

    def __init__(
        self, pool: ResourcePool, *, url: str, kind: str, folder: str | Path, name: str = "rollout",
        **settings: Any,
    ) -> None:  # fmt: skip
        """Connects to a running server.

        Args:
            pool: of one rank, which needs no device.
            url: http://HOST:PORT.
            kind: "vllm" or "sglang".
            folder: for weights; the actor's first rank, this program and the server must see it
                under one path. The last two versions of a run are kept.
            name: of the group.
            **settings: further arguments of `hybridflow.rollout.servers.server.ServerRollout`.

        Raises:
            ConfigError: if the pool has several ranks.
            RankFailure: if no such server answers.
        """
        if pool.num_ranks != 1:
            raise ConfigError(
                f"expected a pool of one rank for the server {url}, got {pool.num_ranks}; one rank "
                f"sends many requests at once"
            )
        super().__init__(ServedWorker, pool, url, kind, name=name, **settings)
        self._folder, self._kept = Path(folder).absolute(), list[Path]()
        self.version = 0

    def take_weights(self, actor: Actor) -> int:
        """Has the server load an actor's weights, after all earlier calls on both.

        Returns:
            Their version: the actor's number of optimizer steps.

        Raises:
            RankFailure: if they could not be written, or were not loaded; the message says which
                weights the server has now.
        """
        version = actor.call("num_updates").result()
        path = self._folder / f"weights-{version}"
        # A folder left by an interrupted run holds other weights.
        shutil.rmtree(path, ignore_errors=True)
        export(actor, path)
        self._kept = [*(kept for kept in self._kept if kept != path), path]
        self.call("take", str(path), version).result()
        self.version = version
        # Keeps the previous folder, which the server loads again if a load fails.
        for old in self._kept[:-2]:
            shutil.rmtree(old, ignore_errors=True)
        self._kept = self._kept[-2:]
        return version
