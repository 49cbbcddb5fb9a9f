"""Continual training of one model on ranks that each store a part of the graph.

Every rank runs the loop over the whole stream. It stores the edges and feature rows of its own
nodes, and computes its share of each batch: the events whose sources it owns, as in GNNFlow,
rebalanced. Scores are gathered before metrics are computed, and gradients are summed before a step,
so that rounds equal those of one process: samples bit for bit, losses and scores up to the order of
float additions. Departure: an event has the same weight whichever rank computes it; a mean of the
ranks' means would favour the events of ranks with fewer.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Int64
from torch import Tensor, nn
from torch.nn import functional as F

from gnnflow.features.cache import FeatureCache
from gnnflow.features.store import Features
from gnnflow.graph.temporal_graph import TemporalGraph
from gnnflow.partitioning.online import OnlinePartitioner
from gnnflow.ranks.exchange import tell_all
from gnnflow.ranks.features import DistributedFeatures
from gnnflow.ranks.sampler import DistributedSampler, owned, rebalance
from gnnflow.training.continual import ContinualTrainer, OptimizerMaker
from gnnflow.training.history import StreamHistory, select_new_rows
from gnnflow.training.link_task import LinkTask
from gnnflow.training.settings import Settings
from shared.comms import Group, all_gather_v, all_reduce, broadcast
from shared.data.events import Events
from shared.errors import ConfigError, DataError

__all__ = ["DistributedTrainer"]

_PHASE = "train"


class DistributedTrainer(ContinualTrainer):
    """A `ContinualTrainer` on all ranks, which make it alike and call its methods together.

    Model and head start from the first rank's weights and stay equal, bit for bit; give them
    unwrapped. Every rank keeps the whole of a model's memory. Each share draws its own dropout, so
    that with dropout rounds differ from one process's as those of two seeds do.

    Args:
        model, graph: see `ContinualTrainer`; the graph takes this rank's edges.
        sampler: `DistributedSampler` of `graph`, over all ranks.
        features: `DistributedFeatures`, where rows of new edges go to the owners of their sources;
            a cache of them; or a store of all rows on each rank.
        partitioner: gives parts to new nodes as they arrive; None if the sampler's `owners` do.
        settings, head, optimizer, changes: as for `ContinualTrainer`, except for `checkpoint`,
            which must be None.

    Raises:
        ConfigError: see `ContinualTrainer`; or the sampler's group is not all ranks, a checkpoint
            is given, or the model is wrapped.
        CommError: a rank died, hangs, or the timeout passed; names it.
    """

    def __init__(
        self,
        model: nn.Module,
        graph: TemporalGraph,
        sampler: DistributedSampler,
        features: Features | FeatureCache | None = None,
        settings: Settings | None = None,
        *,
        partitioner: OnlinePartitioner | None = None,
        head: nn.Module | None = None,
        optimizer: OptimizerMaker | None = None,
        **changes: Any,
    ) -> None:
        group = sampler.group
        if group.ranks != Group.world().ranks:
            raise ConfigError(
                f"expected a sampler over all ranks, got one over {group}; give it Group.world()"
            )
        given = replace(settings or Settings(), **changes)
        if given.checkpoint is not None:
            raise ConfigError(
                "checkpoint: expected None, since runs on ranks write no checkpoints; leave it out"
            )
        if isinstance(model, nn.parallel.DistributedDataParallel):
            raise ConfigError(
                "model: expected it unwrapped, got DistributedDataParallel; give model.module, "
                "whose gradients are summed here"
            )
        given = replace(given, progress=given.progress and group.rank == 0)
        super().__init__(model, graph, sampler, features, given, head=head, optimizer=optimizer)
        self._stream = (group.rank,)
        self.history = _Part(sampler, features, self.history, partitioner, given.window, given.seed)
        self.task = _Shared(
            sampler, model, self.head, sampler, given.batch_size, self.clock, given.grain
        )
        for part in (model, self.head):
            for tensor in part.state_dict().values():
                tensor.copy_(broadcast(group, tensor.to(group.device), 0))


class _Part(StreamHistory):
    """Inserts this rank's part of each increment, and checks that all ranks were given the same."""

    def __init__(
        self,
        sampler: DistributedSampler,
        features: Features | FeatureCache | None,
        history: StreamHistory,
        partitioner: OnlinePartitioner | None,
        window: float | str | None,
        seed: int,
    ) -> None:
        super().__init__(
            sampler.graph,
            features,
            history.replay,
            negatives=history.negatives.kind,
            window=window,
            seed=seed,
            clock=history.clock,
        )
        self._sampler, self._partitioner = sampler, partitioner

    def insert(self, new: Events, *, since: float | None = None) -> None:
        with self.clock.stage("insert"):
            try:
                self._insert_own(new, since)
            except Exception:
                self._agree(new, has_refused=True)
                raise
            self._agree(new)
        with self.clock.stage("sample"):
            self.negatives.observe(new)
            if self.training_negatives is not self.negatives:
                self.training_negatives.observe(new)
            self.replay.observe(new)

    def _insert_own(self, new: Events, since: float | None) -> None:
        graph, sampler = self.graph, self._sampler
        if since is not None:
            graph.expire(before=since)
        if self._partitioner is not None:
            src, dst = new.src, new.dst
            if graph.undirected:
                # Event by event: a source is placed better when its neighbours already have parts.
                src, dst = torch.stack([src, dst], 1).view(-1), torch.stack([dst, src], 1).view(-1)
            self._partitioner.assign(src, dst)
            sampler.owners = self._partitioner.owners
        kept = new if since is None else new[new.t >= since]
        own = owned(kept, sampler.owners, sampler.group.rank, undirected=graph.undirected)
        store = self.features.store if isinstance(self.features, FeatureCache) else self.features
        if not isinstance(store, DistributedFeatures):
            whole, rows = self._new_rows(new)
            graph.add_edges(own.src, own.dst, own.t, own.eid)
            if whole is not None:
                whole.append("edge", rows)
            return
        rows = select_new_rows(store.num_edges, new) if store.edge_dim and len(new) else None
        graph.add_edges(own.src, own.dst, own.t, own.eid)
        if rows is not None:
            store.append("edge", rows, sampler.owners[new.src[len(new) - len(rows) :]])

    def _agree(self, new: Events, has_refused: bool = False) -> None:
        group = self._sampler.group
        word = [int(has_refused), int(new.digest()[:15], 16)]
        words = tell_all(group, [word] * group.world_size, _PHASE)
        for rank, (other_refused, digest) in zip(group.ranks, words, strict=True):
            if other_refused and not has_refused:
                raise DataError(
                    f"rank {rank} refused events that this rank accepted; see that rank's error"
                )
            if digest != word[1] and not has_refused:
                raise DataError(f"rank {rank} was given other events; give all ranks one stream")


class _Shared(LinkTask):
    """A pass over batches of which each rank computes its share."""

    def __init__(self, sampler: DistributedSampler, *given: Any) -> None:
        super().__init__(*given)
        self._sampler, self._group = sampler, sampler.group

    def score(
        self, events: Events, negatives: Tensor, features: Features | FeatureCache | None
    ) -> tuple[Tensor, Tensor]:
        """Scores of the whole batch on every rank, as in `LinkTask`, detached from gradients."""
        shares = self._shares(events)
        found = self._score_own(events, negatives, features, shares[self._group.rank])
        own = torch.cat([found[0][:, None], found[1]], 1).detach()
        parts = all_gather_v(self._group, own.to(self._group.device))
        scores = own.new_empty((len(events), own.shape[1]))
        scores[torch.cat(shares)] = torch.cat(parts).to(own.device)
        return scores[:, 0], scores[:, 1:]

    def train(
        self,
        events: Events,
        negatives: Tensor,
        features: Features | FeatureCache | None,
        optimizer: torch.optim.Optimizer,
        *,
        remember: bool,
    ) -> Tensor:
        self.model.train(), self.head.train()
        total = torch.zeros((), dtype=torch.float64)
        for batch in self._batches(len(events)):
            part, others = events[batch], negatives[batch]
            share = self._shares(part)[self._group.rank]
            pos, neg = self._score_own(part, others, features, share)
            with self.clock.stage("train"):
                loss = F.softplus(-pos).sum() / len(part) + F.softplus(neg).sum() / others.numel()
                optimizer.zero_grad()
                loss.backward()
                total += self._add_up(loss.detach(), optimizer) * len(part)
                optimizer.step()
                if remember and self.memory is not None:
                    self.memory.commit(part)
        return total

    def _shares(self, events: Events) -> list[Int64[Tensor, " _"]]:
        """Which events of a batch each rank computes; sources without an owner go to rank 0."""
        owners = torch.cat([self._sampler.owners, torch.tensor([0])])
        home = owners[events.src.clamp(max=len(owners) - 1)].clamp(min=0)
        return rebalance([(home == rank).nonzero()[:, 0] for rank in range(self._group.world_size)])

    def _score_own(
        self,
        events: Events,
        negatives: Tensor,
        features: Features | FeatureCache | None,
        share: Tensor,
    ) -> tuple[Tensor, Tensor]:
        own = events[share]
        if self._is_as_of_batch:
            # Embedded as of the batch's first event, which may be in another rank's share.
            own = Events(own.src, own.dst, events.t[:1].expand(len(own)), own.eid)
        return super().score(own, negatives[share], features)

    def _add_up(self, loss: Tensor, optimizer: torch.optim.Optimizer) -> float:
        """Sums gradients over ranks in one all-reduce with the loss; returns the summed loss."""
        group = self._group
        params = [param for some in optimizer.param_groups for param in some["params"]]
        has = [param.grad is not None for param in params]
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in params]
        numbers = [loss[None], loss.new_tensor(has), *(grad.flatten() for grad in grads)]
        with group.ledger.phase(_PHASE):
            flat = all_reduce(group, torch.cat(numbers).to(group.device)).to(loss.device)
        # A parameter that no rank has used keeps no gradient, as in one process.
        used = flat[1 : 1 + len(params)] > 0
        sizes = [param.numel() for param in params]
        for param, is_used, grad in zip(
            params, used.tolist(), flat[1 + len(params) :].split(sizes), strict=True
        ):
            param.grad = grad.view_as(param) if is_used else None
        return float(flat[0])
