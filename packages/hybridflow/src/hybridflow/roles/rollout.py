"""Generation on its own ranks: workers that only generate, with weights sent by an actor.

After HybridFlow (arXiv 2409.19256), where models on disjoint pools run at once: while the actor
trains on one batch, these ranks generate the next. `hybridflow.reshard.sync_weights` sends weights.
"""

from __future__ import annotations

from typing import Any

from hybridflow.models.decoder import Decoder
from hybridflow.reshard.exchange import WeightRoute
from hybridflow.reshard.weight_sync import sync_weights
from hybridflow.roles.actor import Actor, ActorWorker, Generator
from hybridflow.roles.model_group import ModelGroup
from hybridflow.workers.batch.layout import Layout
from hybridflow.workers.pool import ResourcePool
from hybridflow.workers.protocols import remote
from shared.errors import ConfigError

__all__ = ["Rollout", "RolloutWorker"]


class RolloutWorker(ActorWorker):
    """One rank of a rollout."""

    staged: Decoder | None = None

    @remote(protocol="one-to-all")
    def stage_weights(self, route: WeightRoute) -> dict[tuple[int, int, int], int]:
        """Receives weights into a second copy; returns their checksums."""
        self.staged = None
        self.staged, found = self.exchange(route).run(self.pieces, self._second, is_source=False)
        return found

    def _second(self) -> Decoder:
        """Allocates a second copy of the shard, beside the one in use."""
        dtype = next(self.model.parameters()).dtype
        fresh = Decoder(self.config, self.model.shard, device=self.device, dtype=dtype)
        return fresh.requires_grad_(False)

    @remote(protocol="one-to-all")
    def use_weights(self, version: int) -> None:
        """Replaces the weights in use by the received ones."""
        if self.staged is None:
            raise ConfigError(f"{self.context.name} has received no weights; call sync_weights")
        self.model = self.generator = self.staged
        self.version, self.staged = version, None

    @remote(protocol="one-to-all")
    def drop_weights(self) -> None:
        """Frees the received weights, and keeps the old ones in use."""
        self.staged = None


class Rollout(Generator, ModelGroup):
    """A model that only generates.

    Attributes:
        version: of its weights, in optimizer steps of the actor; 0 before the first sync.
    """

    def __init__(
        self,
        model: Any,
        pool: ResourcePool,
        *,
        generate: str = "1-1",
        dtype: str = "float32",
        seed: int = 0,
        cache_bytes: int | None = None,
        name: str = "rollout",
    ) -> None:
        """Places a model on a pool.

        Args:
            model: same as the actor's.
            pool: must not be the actor's.
            generate: layout "p-t"; as many replicas as fill the pool.
            dtype: same as the actor's.
            seed: of randomly initialised weights, used until `sync_weights` brings the actor's.
            cache_bytes: same as the actor's.
            name: of the group.

        Raises:
            ConfigError: if the layout does not fill the pool, or the model does not fit.
        """
        layout = Layout(dp=pool.num_ranks).other(generate)
        super().__init__(
            RolloutWorker, pool, model, dtype=dtype, seed=seed, layout=layout,
            cache_bytes=cache_bytes, name=name,
        )  # fmt: skip
        self.version = 0

    def take_weights(self, actor: Actor) -> int:
        """Receives an actor's weights; see `hybridflow.reshard.sync_weights`.

        Returns:
            Their version: the actor's number of optimizer steps.
        """
        return sync_weights(actor, self)
