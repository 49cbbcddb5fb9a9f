"""One rank of an actor: generates, computes log-probabilities, and takes optimizer steps.

Generation may have another layout than training. The weights then move between the two layouts in
place (see `hybridflow.reshard`), on the first call that needs the other layout.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from hybridflow.models.decoder import Decoder, Shard
from hybridflow.models.sequences import log_probs, micro_batches, select_asked
from hybridflow.reshard.exchange import Exchange, Holding, WeightRoute
from hybridflow.reshard.planner import find_held_boxes, find_wanted_boxes
from hybridflow.reshard.transition import Transition
from hybridflow.rl import kl, losses
from hybridflow.rl.aggregate import aggregate, denominator
from hybridflow.roles.model_worker import ModelWorker
from hybridflow.rollout.end_tokens import resolve_by_config
from hybridflow.rollout.native import generator as native
from hybridflow.rollout.rows import build_roll, prompt_rows, sample_ids, take_greedy
from hybridflow.rollout.sampling import Sampling
from hybridflow.tasks.prompts import END_TOKENS
from hybridflow.workers.batch.batch import Batch
from hybridflow.workers.protocols import remote
from shared.errors import ConfigError, DataError

__all__ = ["ActorWorker", "PolicyLoss", "PolicyUpdate"]


@runtime_checkable
class PolicyLoss(Protocol):
    """A loss per token, such as those of `hybridflow.rl.losses`; all tensors are [rows, tokens]."""

    def __call__(self, logp: Tensor, old_logp: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
        """The loss of each token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyUpdate:
    """The objective of an optimizer step.

    Attributes:
        loss: function that returns the loss of each token; see `PolicyLoss`.
        mode: aggregation of token losses, a name of `hybridflow.rl.aggregate`.
        norm: constant divisor, in tokens, of the mode that has one; None for the others.
        kl_coefficient: weight of the divergence from column "ref_log_probs"; 0 leaves it out.
        kl_kind: estimator of the divergence, a name of `hybridflow.rl.kl`.
        entropy_coefficient: weight of the entropy bonus; 0 leaves it out.
        temperature: at which responses were sampled; divides the logits of log-probabilities.
    """

    loss: Callable[..., Tensor] = losses.ppo
    mode: str = "token-mean"
    norm: float | None = None
    kl_coefficient: float = 0.0
    kl_kind: str = "k3"
    entropy_coefficient: float = 0.0
    temperature: float = 1.0


class ActorWorker(ModelWorker):
    """One rank of an actor."""

    def __init__(
        self,
        model: Any,
        *,
        generate: str | None = None,
        cache_bytes: int | None = None,
        **settings: Any,
    ) -> None:
        """Builds the training shard, and plans resharding if generation has another layout."""
        super().__init__(model, **settings)
        self.cache_bytes = cache_bytes
        self.generator = self.model
        self.transition: Transition | None = None
        self._exchanges: dict[WeightRoute, Exchange] = {}
        mesh = self.context.mesh
        groups, at = mesh.generate, self.generation
        self.stages = self.group_of(next(ranks for ranks in groups.pp if self.rank in ranks))
        is_sharded = self.share[1] > 1
        if is_sharded or (groups.pp_size, groups.tp_size) != (mesh.train.pp, mesh.train.tp):
            tp_ranks = next(ranks for ranks in groups.tp if self.rank in ranks)
            shard = Shard(
                self.config, at.pp, groups.pp_size, at.tp, groups.tp_size, self.group_of(tp_ranks)
            )
            self.generator = Decoder(
                self.config, shard, device="meta", dtype=next(self.model.parameters()).dtype
            )
            # With FSDP2 each replica holds a part only, so weights come from all replicas.
            domains = [list(range(self.num_ranks))] if is_sharded else groups.micro_dp
            micro = next(ranks for ranks in domains if self.rank in ranks)
            self.transition = Transition(
                self.model,
                self.generator,
                [find_held_boxes(self.config, mesh.train, r, is_sharded=is_sharded) for r in micro],
                [find_wanted_boxes(self.config, groups, rank) for rank in micro],
                self.group_of(micro),
                self.share,
            )
            self.generator.cos, self.generator.sin = self.model.cos, self.model.sin

    @remote(protocol="3d-all-micro-dp")
    def generate(self, batch: Batch, sampling: Sampling, step: int = 0) -> Batch:
        """Generates responses; see `Generator.generate`."""
        sampling = resolve_by_config(sampling, self.config, batch.meta.get(END_TOKENS, ()))
        if self.transition is not None:
            self.transition.to_generation()
        # Generates for padding rows too, as all shards of a replica need the same rows.
        ids = sample_ids(batch, sampling.num_samples)
        found = native.generate(
            self.generator,
            prompt_rows(batch),
            sampling,
            sample_ids=ids,
            step=step,
            stages=self.stages,
            cache_bytes=self.cache_bytes,
        )
        return build_roll(batch, found, sampling, self.version)

    @remote(protocol="3d-all-micro-dp")
    def greedy(self, batch: Batch, sampling: Sampling, step: int = 0) -> Batch:
        """Generates greedy responses; see `Generator.greedy`."""
        return take_greedy(
            self.generate(batch, replace(sampling, temperature=0, num_samples=1), step)
        )

    @remote(protocol="3d")
    def log_probs(self, batch: Batch, temperature: float = 1.0) -> Batch | None:
        """Log-probabilities of the generated tokens; see `Actor.log_probs`."""
        found = self._log_probs(batch, temperature)
        return None if found is None else Batch(log_probs=found[..., 0], entropy=found[..., 1])

    def _log_probs(self, batch: Batch, temperature: float) -> Tensor | None:
        """Log-probabilities and entropies [rows, W, 2], on the last stage."""
        self._train_layout()
        tokens, mask, (lengths,) = self.read(batch, "lengths")
        rows = list(micro_batches(lengths, self.max_tokens))
        return self.evaluate(
            [select_asked(tokens[k], mask[k]) for k in rows],
            rows,
            lambda k, hidden: torch.stack(
                log_probs(self.model, hidden, tokens[rows[k]], mask[rows[k]], temperature), -1
            ),
        )

    @remote(protocol="3d-metrics")
    def update(self, batch: Batch, settings: PolicyUpdate) -> dict[str, float]:
        """One optimizer step on a mini-batch; see `Actor.update`."""
        if self.optimizer is None:
            raise ConfigError(
                f"{self.context.name}: expected a group with an optimizer, got one without; pass "
                f"`optimizer` when you make it"
            )
        self._train_layout()
        tokens, mask, (lengths, old, advantages) = self.read(
            batch, "lengths", "old_log_probs", "advantages"
        )
        reference = batch["ref_log_probs"].to(self.device) if settings.kl_coefficient else None
        weights = batch["loss_weights"].to(self.device) if "loss_weights" in batch else None
        # Rejected tokens have weight 0, but still count in the denominator.
        divisor, signal = self.summed(
            torch.stack([
                denominator(mask, settings.mode, settings.norm),
                (advantages * mask).abs().sum().double(),
            ])
        )  # fmt: skip
        if not torch.isfinite(signal):
            rows = torch.nonzero(~torch.isfinite(advantages).all(1)).flatten().tolist()
            raise DataError(f"advantages are not finite in rows {rows[:5]} of this rank's part")
        others = settings.kl_coefficient or settings.entropy_coefficient
        if not divisor or not (signal or others):
            return {"loss": 0.0, "is_skipped": 1.0}
        rows = list(micro_batches(lengths, self.max_tokens))
        sums: dict[str, Tensor] = {}

        def loss_of(k: int, hidden: Tensor) -> Tensor:
            at = rows[k]
            found, entropy = log_probs(
                self.model, hidden, tokens[at], mask[at], settings.temperature
            )
            of_tokens = settings.loss(found, old[at], advantages[at], mask[at])
            if not isinstance(of_tokens, Tensor) or of_tokens.shape != found.shape:
                shape = getattr(of_tokens, "shape", None)
                got = type(of_tokens).__name__ if shape is None else f"shape {list(shape)}"
                raise ConfigError(
                    f"loss: expected one number for each token, shape {list(found.shape)}, got "
                    f"{got}; return token losses, and choose their aggregation by `mode`"
                )
            if weights is not None:
                of_tokens = of_tokens * weights[at]
            told = losses.diagnostics(found.detach(), old[at], advantages[at], mask[at])
            told["entropy"] = (entropy.detach() * mask[at]).sum()
            if reference is not None:
                kind = settings.kl_kind
                divergence = kl.estimate(found, reference[at], mask[at], kind=kind)
                of_tokens = of_tokens + settings.kl_coefficient * divergence
                told["kl"] = (divergence.detach() * mask[at]).sum()
            if settings.entropy_coefficient:
                of_tokens = of_tokens - settings.entropy_coefficient * entropy
            loss = aggregate(of_tokens, mask[at], settings.mode, divisor)
            for name, value in {**told, "loss": loss.detach()}.items():
                sums[name] = sums.get(name, 0) + value.double()
            return loss

        step = self.train([select_asked(tokens[k], mask[k]) for k in rows], loss_of)
        if not sums:
            return step  # only the last stage's metrics are used
        totals = self.summed(torch.stack(list(sums.values()))).tolist()
        told = dict(zip(sums, totals, strict=True))
        count, loss = max(1.0, told.pop("tokens")), told.pop("loss")
        means = {name: value / count for name, value in told.items()}
        return {"loss": loss, **means, "num_tokens": count, **step}

    @remote(protocol="rank-zero")
    def holding(self) -> Holding:
        """Describes the weights that these ranks hold, for senders and receivers."""
        return Holding(
            name=self.context.name,
            ranks=tuple(self.context.ranks),
            layout=self.context.mesh.train,
            is_sharded=self.share[1] > 1,
            dtype=next(self.model.parameters()).dtype,
            config=self.config,
        )

    @remote(protocol="one-to-all")
    def send_weights(self, route: WeightRoute) -> tuple[int, dict[tuple[int, int, int], int]]:
        """Sends this rank's part in `reshard.sync_weights`; returns the version, and checksums."""
        _, sums = self.exchange(route).run(self.pieces, self._trained, is_source=True)
        return self.version, sums

    def _trained(self) -> Decoder:
        self._train_layout()
        return self.model

    def exchange(self, route: WeightRoute) -> Exchange:
        """This rank's side of a route, planned on first use."""
        if route not in self._exchanges:
            self._exchanges[route] = Exchange(route)
        return self._exchanges[route]

    def _train_layout(self) -> None:
        if self.transition is not None:
            self.transition.to_training()
