"""Groups of workers that hold a model; they check that the layout fits it."""

from __future__ import annotations

from typing import Any

from hybridflow.models.config import read_config
from hybridflow.models.decoder import Shard
from hybridflow.roles.model_worker import ModelWorker
from hybridflow.workers.batch.layout import Layout
from hybridflow.workers.pool import ResourcePool
from hybridflow.workers.protocols import Mesh
from hybridflow.workers.worker_group import WorkerGroup

__all__ = ["ModelGroup"]


class ModelGroup(WorkerGroup):
    """One model on the ranks of a pool."""

    def __init__(
        self,
        kind: type[ModelWorker],
        pool: ResourcePool,
        model: Any,
        *,
        layout: str | Layout | None = None,
        **settings: Any,
    ) -> None:
        """Makes a worker on each rank.

        Args:
            kind: class of the workers.
            pool: the ranks.
            model: as accepted by `read_config`.
            layout: "p-t-d" of training; all ranks are replicas when not given.
            **settings: keyword arguments of the worker and of `WorkerGroup`.

        Raises:
            ConfigError: if the layout does not fill the pool, or its stages and shards do not
                divide the model; raised before any worker is made.
            RankFailure: if a worker's `__init__` raises.
        """
        train = Layout(dp=pool.num_ranks) if layout is None else Layout.parse(layout)
        train.check(pool.num_ranks)
        config, at = read_config(model), Mesh.of(train, settings.get("generate")).generate
        # All shards make the same demands on a model, so one of each layout is checked.
        for num_stages, num_shards in ((train.pp, train.tp), (at.pp_size, at.tp_size)):
            Shard(config, 0, num_stages, 0, num_shards)
        super().__init__(kind, pool, model, layout=train, **settings)
