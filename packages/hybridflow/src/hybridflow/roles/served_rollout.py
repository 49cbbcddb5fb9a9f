"""A server of vLLM or SGLang as a node of the dataflow: one rank speaks with it.

So a server draws wherever a `Rollout` does, and while it draws the other ranks are at work.
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
from hybridflow.workers.batch.batch import Batch
from hybridflow.workers.pool import ResourcePool
from hybridflow.workers.protocols import remote
from hybridflow.workers.worker import Worker
from shared.errors import ConfigError

__all__ = ["ServedRollout", "ServedWorker"]


class ServedWorker(Worker):
    """The rank that speaks with a server."""

    def __init__(self, url: str, kind: str, **settings: Any) -> None:
        """Connects; arguments as `hybridflow.rollout.servers.server.ServerRollout`'s."""
        self.server = ServerRollout(url, kind=kind, **settings)
        self.version = 0

    @remote(protocol="rank-zero")
    def generate(self, batch: Batch, sampling: Sampling, step: int = 0) -> Batch:
        """Responses to prompts; see `Generator.generate`."""
        ids = sample_ids(batch, sampling.num_samples)
        found = self.server.generate(prompt_rows(batch), sampling, sample_ids=ids, step=step)
        return build_roll(batch, found, sampling, self.version)

    @remote(protocol="rank-zero")
    def greedy(self, batch: Batch, sampling: Sampling, step: int = 0) -> Batch:
        """The likeliest responses; see `Generator.greedy`."""
        return take_greedy(
            self.generate(batch, replace(sampling, temperature=0, num_samples=1), step)
        )

    @remote(protocol="rank-zero")
    def take(self, folder: str, version: int) -> None:
        """Has the server load weights."""
        # The server's own count: what it was started with may be called as any version of ours.
        self.server.sync_weights(folder, (self.server.version or 0) + 1)
        self.version = version


class ServedRollout(Generator):
    """A server that draws.

    Attributes:
        version: of its weights, in optimizer steps of the actor; 0 before the first sync.
    """

    def __init__(
        self, pool: ResourcePool, *, url: str, kind: str, folder: str | Path, name: str = "rollout",
        **settings: Any,
    ) -> None:  # fmt: skip
        """Connects to a server that runs.

        Args:
            pool: of one rank, which needs no device.
            url: http://HOST:PORT.
            kind: "vllm" or "sglang".
            folder: that the actor's first rank, this program and the server see under one path;
                weights go through it, and the last two of a run stay there.
            name: of the group.
            **settings: further ones of `hybridflow.rollout.servers.server.ServerRollout`.

        Raises:
            ConfigError: if the pool has several ranks.
            RankFailure: if there is no such server.
        """
        if pool.num_ranks != 1:
            raise ConfigError(
                f"expected a pool of one rank to speak with {url}, got {pool.num_ranks}; a server "
                f"takes many requests from one"
            )
        super().__init__(ServedWorker, pool, url, kind, name=name, **settings)
        self._folder, self._kept = Path(folder).absolute(), list[Path]()
        self.version = 0

    def take_weights(self, actor: Actor) -> int:
        """Gives the server an actor's weights, after all that both were asked for before.

        Returns:
            Their version, the actor's optimizer steps.

        Raises:
            RankFailure: if they could not be written, or were not loaded; the message says what
                the server has now.
        """
        version = actor.call("num_updates").result()
        path = self._folder / f"weights-{version}"
        # What an interrupted run has left is not what this actor has.
        shutil.rmtree(path, ignore_errors=True)
        export(actor, path)
        self._kept = [*(kept for kept in self._kept if kept != path), path]
        self.call("take", str(path), version).result()
        self.version = version
        # A server that fails to load goes back to the folder before.
        for old in self._kept[:-2]:
            shutil.rmtree(old, ignore_errors=True)
        self._kept = self._kept[-2:]
        return version
