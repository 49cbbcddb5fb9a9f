"""Group relative policy optimization (Shao et al., arXiv 2402.03300) and its variants.

`normalize_std=False` with mode "seq-mean-token-sum-norm" is Dr. GRPO (2503.20783); the losses `gspo`
(2507.18071, mode "seq-mean-token-mean") and `cispo` (2506.13585) of `hybridflow.rl.losses` fit too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from hybridflow.algorithms.dataflow import (
    AlgorithmInputs,
    AlgorithmSpec,
    Score,
    is_kept,
    mask_counted,
    measure_unmoved,
    score_batch,
    select_learnt,
    summarize_step,
)
from hybridflow.rl import advantages, losses
from hybridflow.roles.actor import Actor, Generator
from hybridflow.roles.scoring import Reference
from hybridflow.rollout.sampling import Sampling
from hybridflow.workers.batch.batch import Batch
from hybridflow.workers.future import Future, Joined
from shared.errors import ConfigError

__all__ = ["CISPO_SPEC", "DR_GRPO_SPEC", "GRPO", "GRPO_SPEC", "GSPO_SPEC"]


@dataclass(kw_only=True)
class GRPO:
    """Several responses per prompt; advantages are relative to the response's group."""

    actor: Actor
    score: Score
    sampling: Sampling
    reference: Reference | None = None
    kl_coefficient: float = 0.0
    normalize_std: bool = True
    loss: Callable[..., Tensor] = losses.ppo
    mode: str = "token-mean"
    norm: float | None = None
    num_updates: int = 1
    num_epochs: int = 1

    def __post_init__(self) -> None:
        if self.sampling.num_samples < 2:
            raise ConfigError("sampling.num_samples: a group needs two responses or more, got 1")
        if bool(self.kl_coefficient) != (self.reference is not None):
            raise ConfigError("kl_coefficient and reference go together: give both or neither")

    def rollout(self, prompts: Batch, step: int, generator: Generator | None = None) -> Future:
        """Generates a group of responses to each prompt."""
        return (generator or self.actor).generate(prompts, self.sampling, step)

    def learn(self, roll: Batch | Future | Joined) -> dict[str, float]:
        """Runs one training step of the actor."""
        reference = (
            None
            if self.reference is None
            else self.reference.log_probs(roll, self.sampling.temperature)
        )
        batch = roll if isinstance(roll, Batch) else roll.result()
        batch = score_batch(batch, self.score)
        batch |= Batch(old_log_probs=batch["rollout_log_probs"])
        scores = batch["rewards"].sum(1) if "rewards" in batch else batch["scores"]
        gains = advantages.grpo(
            scores, batch["group"], is_dropped=~is_kept(batch), normalize_std=self.normalize_std
        )
        columns = select_learnt(
            batch, advantages=advantages.expand(gains, mask_counted(batch)),
            old_log_probs=batch["old_log_probs"],
        )  # fmt: skip
        rows = roll | columns if reference is None else roll | reference | columns
        metrics = self.actor.update(
            rows, loss=self.loss, mode=self.mode, norm=self.norm,
            kl_coefficient=self.kl_coefficient, num_updates=self.num_updates,
            num_epochs=self.num_epochs, temperature=self.sampling.temperature,
        )  # fmt: skip
        return summarize_step(batch, metrics, equal_groups=measure_unmoved(gains, batch["group"]))


def _build_grpo(inputs: AlgorithmInputs) -> GRPO:
    return _build(inputs, loss=partial(losses.ppo, clip=inputs.clip))


def _build_dr_grpo(inputs: AlgorithmInputs) -> GRPO:
    return _build(
        inputs, normalize_std=False, loss=partial(losses.ppo, clip=inputs.clip),
        mode="seq-mean-token-sum-norm", norm=float(inputs.sampling.max_new_tokens),
    )  # fmt: skip


def _build_gspo(inputs: AlgorithmInputs) -> GRPO:
    loss = partial(losses.gspo, clip=inputs.clip)
    return _build(inputs, loss=loss, mode="seq-mean-token-mean")


def _build_cispo(inputs: AlgorithmInputs) -> GRPO:
    return _build(inputs, loss=partial(losses.cispo, clip=inputs.clip))


def _build(inputs: AlgorithmInputs, **settings: Any) -> GRPO:
    return GRPO(reference=inputs.reference, kl_coefficient=inputs.beta, **settings, **inputs.common)


GRPO_SPEC = AlgorithmSpec(step="grpo", build=_build_grpo)
DR_GRPO_SPEC = AlgorithmSpec(step="grpo", build=_build_dr_grpo)
GSPO_SPEC = AlgorithmSpec(step="grpo", build=_build_gspo)
CISPO_SPEC = AlgorithmSpec(step="grpo", build=_build_cispo)
