"""Builds a recipe's models on its resource pools."""

from __future__ import annotations

from typing import Any

from hybridflow.algorithms.registry import LOOPS
from hybridflow.models.config import PRESETS, read_config
from hybridflow.models.optimizer import AdamW
from hybridflow.roles.actor import Actor
from hybridflow.roles.critic import Critic
from hybridflow.roles.rollout import Rollout
from hybridflow.roles.scoring import CostModel, Reference, RewardModel
from hybridflow.roles.served_rollout import ServedRollout
from hybridflow.training.config import Recipe
from hybridflow.training.placement import ENGINES
from hybridflow.workers.batch.layout import Layout
from hybridflow.workers.controller import Workers
from hybridflow.workers.pool import ResourcePool
from hybridflow.workers.worker_group import WorkerGroup
from shared.errors import ConfigError

__all__ = ["Models", "start_workers"]

Model = str | dict[str, Any]


def start_workers(recipe: Recipe) -> Workers:
    """Starts the ranks that a recipe asks for.

    Raises:
        ConfigError: if a model's folder has no usable configuration; if ranks are not available, or
            torchrun started another number of processes.
    """
    read_config(recipe.model)  # before ranks are started
    place = recipe.placement
    return ENGINES.get(place.engine)(place.num_ranks_in_all, place.address)


def start_inline(num_ranks: int, _: str) -> Workers:
    """Ranks in this process."""
    return Workers.inline(num_ranks)


def start_local(num_ranks: int, _: str) -> Workers:
    """Processes of this machine."""
    return Workers.local(num_ranks)


def start_ray(num_ranks: int, address: str) -> Workers:
    """Actors of Ray, in the cluster at an address; if it is empty, as `Workers.ray` finds one."""
    return Workers.ray(address or None, num_ranks=num_ranks)


def start_torchrun(num_ranks: int, _: str) -> Workers:
    """The processes that torchrun has started.

    Raises:
        ConfigError: if there are not `num_ranks` of them.
    """
    workers = Workers.torchrun()
    if workers.num_ranks != num_ranks:
        workers.close()
        raise ConfigError(
            f"placement: expected {num_ranks} ranks, those of all pools, and torchrun has started "
            f"{workers.num_ranks}; change --nproc-per-node or --nnodes, or the pools"
        )
    return workers


class Models:
    """The models of a recipe, each placed when its method is called.

    Attributes:
        groups: worker groups that checkpoints save, by role.
    """

    def __init__(self, recipe: Recipe, workers: Workers, vocab_size: int) -> None:
        """Reserves the recipe's pools.

        Args:
            recipe: recipe of the run.
            workers: with as many ranks as the recipe's pools have in all.
            vocab_size: of the tokenizer, for models made from a preset.
        """
        self._recipe, self._workers, self._vocab_size = recipe, workers, vocab_size
        self.groups: dict[str, WorkerGroup] = {}
        # Reserved in the recipe's order, as the rollout's ranks may become several pools.
        self._pools = {
            name: self._pool_of(name, size) for name, size in recipe.placement.sizes.items()
        }
        total = recipe.steps * recipe.num_updates
        settings = recipe.optimizer
        self._optimizer = AdamW(
            lr=settings.lr, weight_decay=settings.weight_decay, schedule=settings.schedule,
            max_grad_norm=settings.max_grad_norm, num_steps=total,
            num_warmup_steps=round(settings.warmup_share * total),
        )  # fmt: skip

    def _pool_of(self, name: str, size: int) -> list[ResourcePool]:
        """Reserves a pool; for rollouts of an asynchronous loop, one pool for each replica."""
        place = self._recipe.placement.of("rollout")
        is_many = LOOPS.get(self._recipe.loop.kind).has_replicas and place.pool == name
        if not is_many or "rollout" not in self._recipe.placement.models:
            return [self._workers.pool(size)]
        layout = Layout(dp=size).other(place.generate or "1-1")
        each = layout.num_ranks // layout.dp
        return [self._workers.pool(each) for _ in range(layout.dp)]

    def _placed(self, role: str, kind: Any, model: str = "", **settings: Any) -> Any:
        recipe = self._recipe
        place = recipe.placement.of(role)
        return kind(
            _named(model or recipe.model, self._vocab_size), self._pools[place.pool][0], name=role,
            train=place.train or None, max_tokens=recipe.max_tokens, **settings,
        )  # fmt: skip

    def _kept(self, role: str, kind: Any, **settings: Any) -> Any:
        self.groups[role] = self._placed(role, kind, **settings)
        return self.groups[role]

    def actor(self) -> Actor:
        """The actor, with its optimizer."""
        place = self._recipe.placement.of("actor")
        return self._kept(
            "actor", Actor, optimizer=self._optimizer, seed=self._recipe.seed,
            generate=place.generate or None, is_sharded=place.is_sharded,
            cache_bytes=self._recipe.cache_bytes or None,
        )  # fmt: skip

    def critic(self, role: str, seed: int) -> Critic:
        """A critic, made from the actor's model, with its optimizer."""
        return self._kept(role, Critic, optimizer=self._optimizer, seed=self._recipe.seed + seed)

    def reference(self) -> Reference | None:
        """The actor's initial weights, for the KL penalty; constant, so not checkpointed."""
        if not self._recipe.beta:
            return None
        return self._placed("reference", Reference, seed=self._recipe.seed)

    def reward(self) -> RewardModel:
        """The reward model that the recipe names; constant, so not checkpointed."""
        return self._placed("reward", RewardModel, self._recipe.reward)

    def cost(self) -> CostModel:
        """The cost model that the recipe names."""
        return self._placed("cost", CostModel, self._recipe.cost)

    def rollouts(self) -> list[Rollout | ServedRollout]:
        """Rollouts beside the actor: none, one, or one per replica in an asynchronous loop."""
        recipe = self._recipe
        if "rollout" not in recipe.placement.models:
            return []
        place = recipe.placement.of("rollout")
        pools, server = self._pools[place.pool], recipe.server
        if server.kind:
            return [
                ServedRollout(
                    pools[0],
                    url=server.url,
                    kind=server.kind,
                    folder=server.folder,
                    log_probs_mode=server.log_probs_mode,
                )
            ]
        model = _named(recipe.model, self._vocab_size)
        return [
            Rollout(
                model,
                pool,
                generate=place.generate or "1-1",
                cache_bytes=recipe.cache_bytes or None,
            )
            for pool in pools
        ]


def _named(model: str, vocab_size: int) -> Model:
    """Sets a preset's vocabulary to the tokenizer's, padded so that tensor shards divide it."""
    name = model.removeprefix("config:")
    if model == name or name not in PRESETS:
        return model
    return {**PRESETS[name], "vocab_size": -(-vocab_size // 16) * 16}
