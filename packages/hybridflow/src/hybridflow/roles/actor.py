"""The actor: the model that generates, computes log-probabilities, and is trained."""

from __future__ import annotations

from typing import Any

from hybridflow.models.optimizer import AdamW
from hybridflow.roles.actor_worker import ActorWorker, PolicyUpdate
from hybridflow.roles.model_group import ModelGroup
from hybridflow.rollout.sampling import Sampling
from hybridflow.workers.batch.batch import Batch
from hybridflow.workers.future import Future, Joined
from hybridflow.workers.metrics import Metrics, steps
from hybridflow.workers.pool import ResourcePool
from hybridflow.workers.worker_group import WorkerGroup

__all__ = ["Actor", "Generator"]


class Generator(WorkerGroup):
    """A model that answers; its workers are `ActorWorker`s."""

    def generate(self, batch: Batch | Future | Joined, sampling: Sampling, step: int = 0) -> Future:
        """Draws responses.

        Args:
            batch: columns prompts [B, P], prompt_lengths [B], sample_ids [B]; others are kept.
            sampling: what is drawn.
            step: of training, which random numbers depend on.

        Returns:
            The future of B x num_samples rows, those of a prompt one after another: the prompts'
            columns and tokens [., P + max_new_tokens], lengths, mask of generated tokens,
            rollout_log_probs, versions (of the weights that made a token), group.
        """
        return self.call("generate", batch, sampling, step)

    def greedy(self, batch: Batch | Future | Joined, sampling: Sampling, step: int = 0) -> Future:
        """Takes the likeliest responses, to be joined with those that were drawn.

        Args:
            batch: as of `generate`.
            sampling: as of `generate`, but for its temperature and number of samples.
            step: as of `generate`.

        Returns:
            The future of one row a prompt: greedy_tokens, greedy_lengths and greedy_mask.
        """
        return self.call("greedy", batch, sampling, step)


class Actor(Generator, ModelGroup):
    """The model that is trained to answer.

    Example:
        >>> actor = Actor("config:tiny-llama", pool, optimizer=AdamW(lr=1e-3))  # doctest: +SKIP
    """

    def __init__(
        self,
        model: Any,
        pool: ResourcePool,
        *,
        train: str | None = None,
        generate: str | None = None,
        optimizer: AdamW | None = None,
        dtype: str = "float32",
        seed: int = 0,
        max_tokens: int = 16384,
        is_sharded: bool = False,
        cache_bytes: int | None = None,
        name: str = "actor",
    ) -> None:
        """Places a model on a pool.

        Args:
            model: a folder that `save_pretrained` wrote, "config:NAME", a mapping of config.json's
                fields, or a Hugging Face model.
            pool: its ranks; share one with other models to colocate them.
            train: "p-t-d"; all replicas when not given.
            generate: "p-t"; as training when not given.
            optimizer: settings; None if it is not trained.
            dtype: "float32", "float64" or "bfloat16".
            seed: of weights that are drawn.
            max_tokens: in a micro-batch of a rank.
            is_sharded: replicas share parameters, gradients and optimizer state out (FSDP2).
            cache_bytes: that keys and values of a generation may take on a rank; prompts go in waves
                that fit. None: all prompts at once.
            name: of the group.

        Raises:
            ConfigError: if the layouts do not fit pool or model, before anything is built.
        """
        super().__init__(
            ActorWorker, pool, model, optimizer=optimizer, dtype=dtype, seed=seed,
            max_tokens=max_tokens, is_sharded=is_sharded, layout=train, generate=generate,
            cache_bytes=cache_bytes, name=name,
        )  # fmt: skip

    def log_probs(self, batch: Batch | Future | Joined, temperature: float = 1.0) -> Future:
        """The trainer's log-probabilities of generated tokens: columns log_probs and entropy."""
        return self.call("log_probs", batch, temperature)

    def update(
        self,
        batch: Batch | Future | Joined,
        *,
        num_updates: int = 1,
        num_epochs: int = 1,
        **settings: Any,
    ) -> Metrics:
        """Trains on a batch, mini-batch after mini-batch.

        Args:
            batch: what `generate` gave, with old_log_probs and advantages [., W]; ref_log_probs
                where there is a KL term; loss_weights [., W] if tokens weigh differently.
            num_updates: mini-batches, consecutive rows; an optimizer step each.
            num_epochs: times that all of them are gone through.
            **settings: of `PolicyUpdate`.

        Returns:
            Means over the steps, as a mapping that waits when it is looked at.
        """
        return steps(self, batch, PolicyUpdate(**settings), num_updates, num_epochs)
