"""A graph, a sampler, features and a model that fit one another and a stream of events."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch

from gnnflow.data.events import Events
from gnnflow.features.cache import FeatureCache
from gnnflow.features.store import Features, FeatureStore
from gnnflow.graph.temporal_graph import TemporalGraph
from gnnflow.sampling.sampler import TemporalSampler
from shared.errors import ConfigError

__all__ = ["ModelName", "Parts", "Recipe"]

ModelName = Literal["tgat", "tf-tgn", "dysat", "sage", "gat"]


class Parts(NamedTuple):
    """What a `ContinualTrainer` takes."""

    model: torch.nn.Module
    graph: TemporalGraph
    sampler: TemporalSampler
    features: Features | FeatureCache | None
    head: torch.nn.Module


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """What is trained, with the settings published for each model where none is given.

    Attributes:
        model: which.
        dim: columns of embeddings.
        fanouts: neighbours a hop; the published ones of the model when None.
        num_layers: blocks of TF-TGN; the others have a layer a hop.
        cache: share of the edge features that a cache on the device holds; 0 for none.
        seed: of weights, draws and everything else.
    """

    model: ModelName = "tgat"
    dim: int = 100
    fanouts: tuple[int, ...] | None = None
    num_layers: int = 2
    cache: float = 0.0
    seed: int = 0

    def build(self, events: Events, *, placement: Any = "cpu") -> Parts:
        """Makes everything, with nothing in the graph yet.

        Raises:
            ConfigError: a setting is out of range.
            DataError: the ids of events with features lie too far apart.
        """
        from gnnflow import models

        fanouts = self.fanouts or _FANOUTS[self.model]
        if self.model == "tf-tgn" and len(fanouts) != 1:
            raise ConfigError(f"fanouts: tf-tgn looks at one hop, expected one, got {fanouts}")
        if not 0 <= self.cache <= 1:
            raise ConfigError(f"cache: expected a share in [0, 1], got {self.cache}")
        width = 0 if events.features is None else events.features.shape[1]
        graph = TemporalGraph(
            undirected=True,
            time_dtype="float64" if events.t.is_floating_point() else "int64",
            placement=placement,
        )
        window = None
        if self.model == "dysat":
            length = (events.t[-1] - events.t[0]).item() if len(events) else 0
            # Snapshots of a tenth of the stream; of a second where all is at one time.
            window = (length / 10 if isinstance(length, float) else length // 10) or 1
        sampler = TemporalSampler(
            graph,
            fanouts,
            policy="uniform" if self.model in ("sage", "gat", "dysat") else "recent",
            snapshots=3 if self.model == "dysat" else 1,
            window=window,
            seed=self.seed,
        )
        torch.manual_seed(self.seed)
        sizes = (self.dim, 0, width)
        model = {
            "tgat": lambda: models.TGAT(*sizes, num_layers=len(fanouts)),
            "tf-tgn": lambda: models.TFTGN(*sizes, num_blocks=self.num_layers),
            "dysat": lambda: models.DySAT(*sizes, num_layers=len(fanouts)),
            "sage": lambda: models.GraphSAGE(*sizes, num_layers=len(fanouts)),
            "gat": lambda: models.GAT(*sizes, num_layers=len(fanouts)),
        }[self.model]()
        features: Features | FeatureCache | None = None
        if events.features is not None:
            features = FeatureStore(edge=events.rows_by_id())
            if self.cache:
                features = FeatureCache(features, node=0.0, edge=self.cache)
        return Parts(model, graph, sampler, features, models.LinkHead(self.dim))


_FANOUTS: dict[str, tuple[int, ...]] = {
    "tgat": (10, 10),
    "tf-tgn": (10,),
    "dysat": (10, 10),
    "sage": (15, 10),
    "gat": (10, 10),
}
