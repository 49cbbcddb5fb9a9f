"""Models that only score: the reference policy, reward models and cost models.

A reward model is a sequence classifier with one label, trained on preferences; `fit` does that
training here, for small models and tests (Bradley and Terry's loss on pairs).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from hybridflow.models.optimizer import AdamW
from hybridflow.models.sequences import micro_batches, scores
from hybridflow.roles.actor import ActorWorker
from hybridflow.roles.model_group import ModelGroup
from hybridflow.roles.model_worker import ModelWorker
from hybridflow.workers.batch.batch import Batch
from hybridflow.workers.future import Future, Joined
from hybridflow.workers.pool import ResourcePool
from hybridflow.workers.protocols import remote
from shared.errors import ConfigError

__all__ = ["CostModel", "Reference", "RewardModel", "ScoreWorker"]


class ScoreWorker(ModelWorker):
    """One rank of a model that gives each sequence a score."""

    @remote(protocol="3d")
    def scores(self, batch: Batch, column: str) -> Batch | None:
        """The score of each sequence."""
        tokens, lengths = batch["tokens"].to(self.device), batch["lengths"].to(self.device)
        rows = list(micro_batches(lengths, self.max_tokens))
        found = self.evaluate(
            [tokens[k, : int(lengths[k].max())] for k in rows],
            rows,
            lambda k, hidden: scores(self.model, hidden, lengths[rows[k]]),
        )
        return None if found is None else Batch({column: found})

    @remote(protocol="3d-metrics")
    def fit(self, batch: Batch) -> dict[str, float]:
        """One step that ranks "chosen" above "rejected"; see `RewardModel.fit`."""
        if self.optimizer is None:
            raise ConfigError(
                f"{self.context.name} has no optimizer, so it cannot be fitted; pass `optimizer` "
                f"when you make it"
            )
        kept = batch.without_padding().to(self.device)
        count = self.summed(torch.tensor(float(len(kept)), dtype=torch.float64))
        told = torch.zeros(2, dtype=torch.float64, device=self.device)
        both = torch.cat([kept["chosen_lengths"], kept["rejected_lengths"]])
        tokens = torch.cat([kept["chosen"], kept["rejected"]])

        def loss_of(k: int, hidden: Tensor) -> Tensor:
            chosen, rejected = scores(self.model, hidden, both).chunk(2)
            loss = -F.logsigmoid(chosen - rejected).sum() / float(count)
            told[0], told[1] = loss.detach(), (chosen > rejected).sum() / float(count)
            return loss

        # Padding rows are left out, so a rank may have no pair.
        step = self.train([tokens[:, : int(both.max())]] if len(kept) else [], loss_of)
        loss, accuracy = self.summed(told).tolist()
        return {"loss": loss, "accuracy": accuracy, **step}


class _Scorer(ModelGroup):
    column: str

    def __init__(
        self,
        model: Any,
        pool: ResourcePool,
        *,
        train: str | None = None,
        optimizer: AdamW | None = None,
        dtype: str = "float32",
        seed: int = 2,
        max_tokens: int = 16384,
        name: str | None = None,
    ) -> None:
        """Places a model on a pool; arguments as `Actor`'s, optimizer only for `fit`."""
        super().__init__(
            ScoreWorker, pool, model, head="scalar", optimizer=optimizer, dtype=dtype, seed=seed,
            max_tokens=max_tokens, layout=train, name=name or type(self).__name__.lower(),
        )  # fmt: skip

    def scores(self, batch: Batch | Future | Joined) -> Future:
        """The score of each sequence [rows], in the column "scores" or "costs"."""
        return self.call("scores", batch, self.column)

    def fit(self, batch: Batch) -> dict[str, float]:
        """One step on pairs of sequences.

        Args:
            batch: columns chosen, rejected [rows, W], chosen_lengths, rejected_lengths [rows].

        Returns:
            Loss, accuracy and the optimizer's metrics.
        """
        return self.call("fit", batch).result()[0]


class RewardModel(_Scorer):
    """Scores how good a response is: column "scores"."""

    column = "scores"


class CostModel(_Scorer):
    """Scores how harmful a response is: column "costs"; for Safe-RLHF."""

    column = "costs"


class Reference(ModelGroup):
    """The policy that a KL penalty keeps the actor close to: column "ref_log_probs"."""

    def __init__(
        self,
        model: Any,
        pool: ResourcePool,
        *,
        train: str | None = None,
        dtype: str = "float32",
        seed: int = 0,
        max_tokens: int = 16384,
        name: str = "reference",
    ) -> None:
        """Places a model on a pool; arguments as `Actor`'s. Equal seeds give equal weights."""
        super().__init__(
            ReferenceWorker, pool, model, dtype=dtype, seed=seed, max_tokens=max_tokens,
            layout=train, name=name,
        )  # fmt: skip

    def log_probs(self, batch: Batch | Future | Joined, temperature: float = 1.0) -> Future:
        """Log-probabilities of generated tokens, column "ref_log_probs" [rows, W]."""
        return self.call("reference", batch, temperature)


class ReferenceWorker(ActorWorker):
    """One rank of a reference."""

    @remote(protocol="3d")
    def reference(self, batch: Batch, temperature: float = 1.0) -> Batch | None:
        """Log-probabilities of generated tokens."""
        found = self._log_probs(batch, temperature)
        return None if found is None else Batch(ref_log_probs=found[..., 0])
