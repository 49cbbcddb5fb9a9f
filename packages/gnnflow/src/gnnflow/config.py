"""Recipes: a graph, a sampler, features and a model that fit together and a stream of events."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from shared.errors import ConfigError
from shared.registry import Registry

if TYPE_CHECKING:
    import torch

    from gnnflow.features.cache import FeatureCache
    from gnnflow.features.store import Features
    from gnnflow.graph.block_store import Placement
    from gnnflow.graph.temporal_graph import TemporalGraph
    from gnnflow.models.spec import ModelEntry
    from gnnflow.sampling.sampler import NeighborTimes, TemporalSampler
    from shared.data.events import Events

__all__ = ["MODELS", "Parts", "Recipe"]

# Registered by import path, so that the command line's help does not import torch.
MODELS: Registry[str, ModelEntry] = Registry("model")
MODELS.add("tgat", "gnnflow.models.tgat:SPEC", "attention over timed neighbours, hop by hop")
MODELS.add("tf-tgn", "gnnflow.models.tf_tgn:SPEC", "a Transformer decoder over neighbours")
MODELS.add("dysat", "gnnflow.models.dysat:SPEC", "attention in snapshots, recurrence over them")
MODELS.add("sage", "gnnflow.models.sage:SPEC", "means of sampled neighbours, without time")
MODELS.add("gat", "gnnflow.models.gat:SPEC", "attention over sampled neighbours, without time")


class Parts(NamedTuple):
    """Arguments of a `ContinualTrainer`, by name."""

    model: torch.nn.Module
    graph: TemporalGraph
    sampler: TemporalSampler
    features: Features | FeatureCache | None
    head: torch.nn.Module


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Model and sampling settings; fanouts and policy default to the model's published ones.

    Attributes:
        model: a name of `MODELS`.
        dim: columns of embeddings.
        fanouts: neighbours a hop; the model's own when None.
        policy: a name of `gnnflow.sampling.policies`; the model's own when None.
        num_layers: blocks of TF-TGN; the other models have a layer a hop.
        cache: share of the edge features that a cache on the device holds, in [0, 1]; 0 for none.
        cache_policy: a name of `gnnflow.features.policies`: which rows leave the cache.
        neighbor_times: "edge" or "root", see `TemporalSampler`.
        seed: of weights, draws and everything else.
    """

    model: str = "tgat"
    dim: int = 100
    fanouts: tuple[int, ...] | None = None
    policy: str | None = None
    num_layers: int = 2
    cache: float = 0.0
    cache_policy: str = "keep"
    neighbor_times: NeighborTimes = "edge"
    seed: int = 0

    def build(self, events: Events, *, placement: Placement = "cpu") -> Parts:
        """Makes everything, with nothing in the graph yet.

        Args:
            events: the stream, for the type of its times, its length and its features.
            placement: where the graph lies and is sampled, see `TemporalGraph`.

        Raises:
            ConfigError: a setting is out of range, or a name is not registered.
            DataError: the ids of events with features lie too far apart.
        """
        # Imported here, since the command line reads `MODELS` for its help.
        import torch

        from gnnflow.features.cache import FeatureCache
        from gnnflow.features.store import FeatureStore
        from gnnflow.graph.temporal_graph import TemporalGraph
        from gnnflow.models.heads import LinkHead
        from gnnflow.models.spec import ModelSizes
        from gnnflow.sampling.sampler import TemporalSampler

        spec = MODELS.get(self.model)
        fanouts = self.fanouts or spec.fanouts
        if spec.max_hops is not None and len(fanouts) > spec.max_hops:
            raise ConfigError(
                f"fanouts: {self.model} reads {spec.max_hops} hop, expected as many fanouts, got "
                f"{list(fanouts)}; give fewer, or another model"
            )
        if not 0 <= self.cache <= 1:
            raise ConfigError(f"cache: expected a share in [0, 1], got {self.cache}")
        graph = TemporalGraph(
            undirected=True,
            time_dtype="float64" if events.t.is_floating_point() else "int64",
            placement=placement,
        )
        sampler = TemporalSampler(
            graph,
            fanouts,
            policy=self.policy or spec.policy,
            snapshots=spec.num_snapshots,
            window=_choose_window(events) if spec.num_snapshots > 1 else None,
            neighbor_times=self.neighbor_times,
            seed=self.seed,
        )
        torch.manual_seed(self.seed)
        width = 0 if events.features is None else events.features.shape[1]
        model = spec.build(ModelSizes(self.dim, width, len(fanouts), self.num_layers))
        features: Features | FeatureCache | None = None
        if events.features is not None:
            features = FeatureStore(edge=events.rows_by_id())
            if self.cache:
                features = FeatureCache(
                    features, node=0.0, edge=self.cache, policy=self.cache_policy
                )
        return Parts(model, graph, sampler, features, LinkHead(self.dim))


def _choose_window(events: Events) -> int | float:
    """A tenth of the stream; a unit of time where all events are at one time."""
    length = (events.t[-1] - events.t[0]).item() if len(events) else 0
    return (length / 10 if isinstance(length, float) else length // 10) or 1
