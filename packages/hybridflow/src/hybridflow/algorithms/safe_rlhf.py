"""Safe RLHF (Dai et al., arXiv 2310.12773): reward against cost, weighted by a multiplier.

PPO with two critics. The Lagrange multiplier rises while the mean cost exceeds its limit; half of
the KL penalty is subtracted from the reward, and half added to the cost.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

from hybridflow.algorithms.dataflow import (
    AlgorithmInputs,
    AlgorithmSpec,
    Score,
    average_kept,
    mask_counted,
    score_batch,
    select_learnt,
    summarize_step,
    token_rewards,
)
from hybridflow.rl import advantages, lagrange, losses
from hybridflow.roles.actor import Actor, Generator
from hybridflow.roles.critic import Critic
from hybridflow.roles.scoring import Reference
from hybridflow.rollout.sampling import Sampling
from hybridflow.workers.batch.batch import Batch
from hybridflow.workers.future import Future, Joined

__all__ = ["SAFE_RLHF_SPEC", "SafeRLHF"]


@dataclass(kw_only=True)
class SafeRLHF:
    """PPO for the reward with a bound on the cost; `cost` returns "costs" [rows]."""

    actor: Actor
    critic: Critic
    cost_critic: Critic
    score: Score
    cost: Score
    sampling: Sampling
    reference: Reference | None = None
    beta: float = 0.0
    multiplier: lagrange.Multiplier = field(default_factory=lagrange.Multiplier)
    gamma: float = 1.0
    lam: float = 0.95
    clip: tuple[float, float] = (0.2, 0.2)
    num_updates: int = 1

    def rollout(self, prompts: Batch, step: int, generator: Generator | None = None) -> Future:
        """Generates responses to prompts."""
        return (generator or self.actor).generate(prompts, self.sampling, step)

    def learn(self, roll: Batch | Future | Joined) -> dict[str, float]:
        """Runs one training step of the multiplier, both critics and the actor."""
        asked = (self.critic.values(roll), self.cost_critic.values(roll))
        reference = (
            None
            if self.reference is None
            else self.reference.log_probs(roll, self.sampling.temperature)
        )
        batch = roll if isinstance(roll, Batch) else roll.result()
        batch = score_batch(batch, self.score)
        batch |= Batch(old_log_probs=batch["rollout_log_probs"])
        batch = score_batch(batch, self.cost, ["costs"])
        if reference is not None:
            batch |= reference.result()
        mask, gains, trained = mask_counted(batch), [], []
        for critic, values, column, sign in (
            (self.critic, asked[0], "scores", 1),
            (self.cost_critic, asked[1], "costs", -1),
        ):
            rewards, _ = token_rewards(batch, beta=sign * self.beta / 2, score=column)
            gain, returns = advantages.gae(
                rewards, values.result()["values"], mask, self.gamma, self.lam
            )
            gains.append(advantages.whiten(gain, mask, shift_mean=column == "scores"))
            rows = roll | values | select_learnt(batch, returns=returns)
            trained.append(critic.update(rows, num_updates=self.num_updates))
        mean_cost = average_kept(batch["costs"], batch)
        if mask.any():
            self.multiplier = self.multiplier.update(mean_cost)
        combined = lagrange.combine(gains[0], gains[1], self.multiplier.value)
        columns = select_learnt(batch, advantages=combined, old_log_probs=batch["old_log_probs"])
        loss = partial(losses.ppo, clip=self.clip)
        metrics = self.actor.update(
            roll | columns, loss=loss, num_updates=self.num_updates,
            temperature=self.sampling.temperature,
        )  # fmt: skip
        return summarize_step(
            batch, metrics, cost=mean_cost, multiplier=self.multiplier.value,
            value_loss=trained[0]["loss"], cost_value_loss=trained[1]["loss"],
        )  # fmt: skip


def _build(inputs: AlgorithmInputs) -> SafeRLHF:
    assert inputs.cost is not None, "recipes are checked for one"
    return SafeRLHF(
        critic=inputs.critics["critic"], cost_critic=inputs.critics["cost-critic"],
        cost=inputs.cost, **inputs.penalty, **inputs.common,
    )  # fmt: skip


SAFE_RLHF_SPEC = AlgorithmSpec(step="safe_rlhf", build=_build)
