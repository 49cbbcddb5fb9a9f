"""Groups of workers that hold a model: a layout that does not fit it is refused here."""

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
            kind: of worker.
            pool: the ranks.
            model: what `read_config` takes.
            layout: "p-t-d" of training; all ranks are replicas when not given.
            **settings: of the worker and of `WorkerGroup`.

        Raises:
            ConfigError: if the layout does not fill the pool, or its stages and shards do not
                divide the model; before any rank is asked.
            RankFailure: if a worker's `__init__` raises.
        """
        train = Layout(dp=pool.num_ranks) if layout is None else Layout.parse(layout)
        train.check(pool.num_ranks)
        config, at = read_config(model), Mesh.of(train, settings.get("generate")).generate
        # Shards are alike in what they ask of a model.
        for num_stages, num_shards in ((train.pp, train.tp), (at.pp_size, at.tp_size)):
            Shard(config, 0, num_stages, 0, num_shards)
        super().__init__(kind, pool, model, layout=train, **settings)
