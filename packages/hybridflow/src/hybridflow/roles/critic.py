"""The critic: a decoder with a scalar head that estimates the value of each token's state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hybridflow.models.optimizer import AdamW
from hybridflow.models.sequences import micro_batches, select_asked, values
from hybridflow.rl import losses
from hybridflow.rl.aggregate import aggregate, denominator
from hybridflow.roles.model_group import ModelGroup
from hybridflow.roles.model_worker import ModelWorker
from hybridflow.workers.batch.batch import Batch
from hybridflow.workers.future import Future, Joined
from hybridflow.workers.metrics import Metrics, steps
from hybridflow.workers.pool import ResourcePool
from hybridflow.workers.protocols import remote
from shared.errors import ConfigError

__all__ = ["Critic", "CriticWorker", "ValueUpdate"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueUpdate:
    """The objective of a critic's optimizer step.

    Attributes:
        clip: distance from the old value beyond which the gradient is cut; None: no clipping.
        mode: aggregation of token losses, a name of `hybridflow.rl.aggregate`.
    """

    clip: float | None = 0.2
    mode: str = "token-mean"


class CriticWorker(ModelWorker):
    """One rank of a critic."""

    @remote(protocol="3d")
    def values(self, batch: Batch) -> Batch | None:
        """The value before each generated token, column "values"."""
        tokens, mask, (lengths,) = self.read(batch, "lengths")
        rows = list(micro_batches(lengths, self.max_tokens))
        found = self.evaluate(
            [select_asked(tokens[k], mask[k]) for k in rows],
            rows,
            lambda k, hidden: values(self.model, hidden, tokens[rows[k]], mask[rows[k]]),
        )
        return None if found is None else Batch(values=found)

    @remote(protocol="3d-metrics")
    def update(self, batch: Batch, settings: ValueUpdate) -> dict[str, float]:
        """One optimizer step on a mini-batch."""
        if self.optimizer is None:
            raise ConfigError(
                f"{self.context.name} has no optimizer, so it cannot be updated; pass `optimizer` "
                f"when you make it"
            )
        tokens, mask, (lengths, old, returns) = self.read(batch, "lengths", "values", "returns")
        divisor = self.summed(denominator(mask, settings.mode))
        if not divisor:
            return {"loss": 0.0, "is_skipped": 1.0}
        rows = list(micro_batches(lengths, self.max_tokens))
        total = torch.zeros((), dtype=torch.float64, device=self.device)

        def loss_of(k: int, hidden: Tensor) -> Tensor:
            at = rows[k]
            found = values(self.model, hidden, tokens[at], mask[at])
            of_tokens = losses.value(found, old[at], returns[at], mask[at], settings.clip)
            loss = aggregate(of_tokens, mask[at], settings.mode, divisor)
            total.add_(loss.detach())
            return loss

        step = self.train([select_asked(tokens[k], mask[k]) for k in rows], loss_of)
        return {"loss": float(self.summed(total)), **step}


class Critic(ModelGroup):
    """The model that estimates values, for PPO."""

    def __init__(
        self,
        model: Any,
        pool: ResourcePool,
        *,
        train: str | None = None,
        optimizer: AdamW | None = None,
        dtype: str = "float32",
        seed: int = 1,
        max_tokens: int = 16384,
        name: str = "critic",
    ) -> None:
        """Places a model on a pool; arguments as `Actor`'s.

        The model is a classifier's folder with one label, or a language model's: the scalar head
        then starts at zero.
        """
        super().__init__(
            CriticWorker, pool, model, head="scalar", optimizer=optimizer, dtype=dtype, seed=seed,
            max_tokens=max_tokens, layout=train, name=name,
        )  # fmt: skip

    def values(self, batch: Batch | Future | Joined) -> Future:
        """The value before each generated token: column values [., W], 0 elsewhere."""
        return self.call("values", batch)

    def update(
        self,
        batch: Batch | Future | Joined,
        *,
        num_updates: int = 1,
        num_epochs: int = 1,
        **settings: Any,
    ) -> Metrics:
        """Trains on a batch with columns values (before the update) and returns.

        Args:
            batch: columns of `generate`, and these two.
            num_updates: number of mini-batches, with one optimizer step each.
            num_epochs: passes over all mini-batches.
            **settings: fields of `ValueUpdate`.

        Returns:
            Means over the steps, as a mapping that waits when it is read.
        """
        return steps(self, batch, ValueUpdate(**settings), num_updates, num_epochs)
