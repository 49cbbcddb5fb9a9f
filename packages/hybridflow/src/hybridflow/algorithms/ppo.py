"""Proximal policy optimization with a critic (Schulman et al., arXiv 1707.06347)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from hybridflow.algorithms.dataflow import (
    AlgorithmInputs,
    AlgorithmSpec,
    Score,
    is_kept,
    mask_counted,
    score_batch,
    select_learnt,
    summarize_step,
    token_rewards,
)
from hybridflow.rl import advantages, kl, losses
from hybridflow.roles.actor import Actor, Generator
from hybridflow.roles.critic import Critic
from hybridflow.roles.scoring import Reference
from hybridflow.rollout.sampling import Sampling
from hybridflow.workers.batch.batch import Batch
from hybridflow.workers.future import Future, Joined

__all__ = ["PPO", "PPO_SPEC"]


@dataclass(kw_only=True)
class PPO:
    """Rewards of tokens minus a KL penalty; advantages by a critic (GAE)."""

    actor: Actor
    critic: Critic
    score: Score
    sampling: Sampling
    reference: Reference | None = None
    beta: float | kl.AdaptiveKL = 0.0
    gamma: float = 1.0
    lam: float = 0.95
    clip: tuple[float, float] = (0.2, 0.2)
    num_updates: int = 1
    num_epochs: int = 1

    def rollout(self, prompts: Batch, step: int, generator: Generator | None = None) -> Future:
        """Generates responses to prompts."""
        return (generator or self.actor).generate(prompts, self.sampling, step)

    def learn(self, roll: Batch | Future | Joined) -> dict[str, float]:
        """Runs one training step of critic and actor; independent calls run at once."""
        values = self.critic.values(roll)
        reference = (
            None
            if self.reference is None
            else self.reference.log_probs(roll, self.sampling.temperature)
        )
        batch = roll if isinstance(roll, Batch) else roll.result()
        batch = score_batch(batch, self.score)
        batch |= Batch(old_log_probs=batch["rollout_log_probs"])
        batch |= values.result()
        if reference is not None:
            batch |= reference.result()
        beta = self.beta.beta if isinstance(self.beta, kl.AdaptiveKL) else self.beta
        rewards, divergence = token_rewards(batch, beta=beta)
        mask = mask_counted(batch)
        gains, returns = advantages.gae(rewards, batch["values"], mask, self.gamma, self.lam)
        more = {}
        if divergence is not None:
            more["kl"] = float(kl.sequence_mean(divergence, mask))
            if isinstance(self.beta, kl.AdaptiveKL):
                self.beta = self.beta.update(more["kl"], int(is_kept(batch).sum()))
        learnt = {"num_updates": self.num_updates, "num_epochs": self.num_epochs}
        trained = self.critic.update(
            roll | values | select_learnt(batch, returns=returns), **learnt
        )
        columns = select_learnt(
            batch, advantages=advantages.whiten(gains, mask), old_log_probs=batch["old_log_probs"]
        )
        metrics = self.actor.update(
            roll | columns, loss=partial(losses.ppo, clip=self.clip),
            temperature=self.sampling.temperature, **learnt,
        )  # fmt: skip
        return summarize_step(batch, metrics, value_loss=trained["loss"], **more)


def _build(inputs: AlgorithmInputs) -> PPO:
    return PPO(critic=inputs.critics["critic"], **inputs.penalty, **inputs.common)


PPO_SPEC = AlgorithmSpec(step="ppo", build=_build)
