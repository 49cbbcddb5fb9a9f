"""ReMax (Li et al., arXiv 2310.10505): REINFORCE against the reward of the greedy response."""

from __future__ import annotations

from dataclasses import dataclass
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
from hybridflow.rl import advantages, losses
from hybridflow.roles.actor import Actor, Generator
from hybridflow.rollout.sampling import Sampling
from hybridflow.workers.batch.batch import Batch
from hybridflow.workers.future import Future, Joined
from shared.errors import ConfigError

__all__ = ["REMAX_SPEC", "ReMax"]


@dataclass(kw_only=True)
class ReMax:
    """One response per prompt, with the greedy response's reward as its baseline; no critic."""

    actor: Actor
    score: Score
    sampling: Sampling
    clip: tuple[float, float] = (0.2, 0.2)
    num_updates: int = 1

    def __post_init__(self) -> None:
        if self.sampling.num_samples != 1:
            raise ConfigError(
                f"sampling.num_samples: expected 1 for ReMax, got {self.sampling.num_samples}"
            )

    def rollout(self, prompts: Batch, step: int, generator: Generator | None = None) -> Joined:
        """Generates a sampled and a greedy response to each prompt."""
        model = generator or self.actor
        roll = model.generate(prompts, self.sampling, step)
        return roll | model.greedy(prompts, self.sampling, step)

    def learn(self, roll: Batch | Future | Joined) -> dict[str, float]:
        """Runs one training step of the actor."""
        batch = roll if isinstance(roll, Batch) else roll.result()
        batch |= self._baseline(batch)
        batch = score_batch(batch, self.score)
        batch |= Batch(old_log_probs=batch["rollout_log_probs"])
        rewards, _ = token_rewards(batch)
        baseline = batch["baseline"].to(rewards.dtype)
        columns = select_learnt(
            batch, advantages=advantages.remax(rewards, mask_counted(batch), baseline),
            old_log_probs=batch["old_log_probs"],
        )  # fmt: skip
        loss = partial(losses.ppo, clip=self.clip)
        metrics = self.actor.update(
            roll | columns, loss=loss, num_updates=self.num_updates,
            temperature=self.sampling.temperature,
        )  # fmt: skip
        return summarize_step(batch, metrics, greedy_reward=average_kept(baseline, batch))

    def _baseline(self, batch: Batch) -> Batch:
        """Scores the greedy responses; if one has no reward, its row is dropped."""
        made = ("tokens", "lengths", "mask")
        if "greedy_tokens" not in batch:
            raise ConfigError("expected column greedy_tokens; draw responses by ReMax.rollout")
        likeliest = Batch({name: batch[f"greedy_{name}"] for name in made})
        found = score_batch(batch.drop(*made) | likeliest, self.score)
        worth = found["rewards"].sum(1) if "rewards" in found else found["scores"]
        return select_learnt(found, baseline=worth)


def _build(inputs: AlgorithmInputs) -> ReMax:
    return ReMax(clip=inputs.clip, **inputs.common)


REMAX_SPEC = AlgorithmSpec(step="remax", build=_build, has_reference=False)
