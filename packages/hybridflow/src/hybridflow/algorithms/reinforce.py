"""REINFORCE with a baseline from the group's other samples, or from the batch.

RLOO (Ahmadian et al., arXiv 2402.14740) and REINFORCE++ (Hu et al., arXiv 2501.03262).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

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
    token_rewards,
)
from hybridflow.rl import advantages, losses
from hybridflow.roles.actor import Actor, Generator
from hybridflow.roles.scoring import Reference
from hybridflow.rollout.sampling import Sampling
from hybridflow.workers.batch.batch import Batch
from hybridflow.workers.future import Future, Joined
from shared.errors import ConfigError

__all__ = ["REINFORCE_PLUS_PLUS_SPEC", "RLOO", "RLOO_SPEC", "ReinforcePlusPlus"]


@dataclass(kw_only=True)
class _Reinforce:
    """Base of both: an actor, and a reward that includes a KL penalty."""

    actor: Actor
    score: Score
    sampling: Sampling
    reference: Reference | None = None
    beta: float = 0.0
    clip: tuple[float, float] = (0.2, 0.2)
    num_updates: int = 1
    num_epochs: int = 1

    def rollout(self, prompts: Batch, step: int, generator: Generator | None = None) -> Future:
        """Generates responses to prompts."""
        return (generator or self.actor).generate(prompts, self.sampling, step)

    def _rewarded(self, roll: Batch | Future | Joined) -> Batch:
        """Returns the rollout with the rewards of its tokens."""
        reference = (
            None
            if self.reference is None
            else self.reference.log_probs(roll, self.sampling.temperature)
        )
        batch = roll if isinstance(roll, Batch) else roll.result()
        batch = score_batch(batch, self.score)
        batch |= Batch(old_log_probs=batch["rollout_log_probs"])
        if reference is not None:
            batch |= reference.result()
        return batch | Batch(penalized=token_rewards(batch, beta=self.beta)[0])

    def _update(
        self, roll: Batch | Future | Joined, batch: Batch, gains: Tensor, **more: float
    ) -> dict:
        columns = select_learnt(batch, advantages=gains, old_log_probs=batch["old_log_probs"])
        metrics = self.actor.update(
            roll | columns, loss=partial(losses.ppo, clip=self.clip),
            num_updates=self.num_updates, num_epochs=self.num_epochs,
            temperature=self.sampling.temperature,
        )  # fmt: skip
        return summarize_step(batch, metrics, **more)


@dataclass(kw_only=True)
class RLOO(_Reinforce):
    """The advantage of a response is its reward minus the mean of its group's others."""

    def __post_init__(self) -> None:
        if self.sampling.num_samples < 2:
            raise ConfigError("sampling.num_samples: a group needs two responses or more, got 1")

    def learn(self, roll: Batch | Future | Joined) -> dict[str, float]:
        """One step of the actor."""
        batch = self._rewarded(roll)
        scores, group = batch["penalized"].sum(1), batch["group"]
        gains = advantages.rloo(scores, group, is_dropped=~is_kept(batch))
        of_tokens = advantages.expand(gains, mask_counted(batch))
        return self._update(roll, batch, of_tokens, equal_groups=measure_unmoved(gains, group))


class ReinforcePlusPlus(_Reinforce):
    """The advantage of a token is its return, normalised over the whole batch."""

    def learn(self, roll: Batch | Future | Joined) -> dict[str, float]:
        """One step of the actor."""
        batch = self._rewarded(roll)
        gains = advantages.reinforce_plus_plus(batch["penalized"], mask_counted(batch), 1.0)
        return self._update(roll, batch, gains)


def _build_rloo(inputs: AlgorithmInputs) -> RLOO:
    return RLOO(**inputs.penalty, **inputs.common)


def _build_reinforce_plus_plus(inputs: AlgorithmInputs) -> ReinforcePlusPlus:
    return ReinforcePlusPlus(**inputs.penalty, **inputs.common)


RLOO_SPEC = AlgorithmSpec(step="grpo", build=_build_rloo)
REINFORCE_PLUS_PLUS_SPEC = AlgorithmSpec(step="reinforce", build=_build_reinforce_plus_plus)
