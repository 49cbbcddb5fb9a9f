"""ReMax (Li et al., arXiv 2310.10505): REINFORCE against the reward of the greedy response."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from torch import Tensor

from hybridflow.actor import Actor, Generator
from hybridflow.algos.dataflow import Score, fetched, learnt_columns, token_rewards, told
from hybridflow.batch import Batch
from hybridflow.future import Future, Joined
from hybridflow.rl import advantages, losses
from hybridflow.rollout.sampling import Sampling
from shared.errors import ConfigError

__all__ = ["ReMax"]


@dataclass(kw_only=True)
class ReMax:
    """One response a prompt, and one more greedy generation as its baseline; no critic."""

    actor: Actor
    score: Score
    sampling: Sampling
    clip: tuple[float, float] = (0.2, 0.2)
    num_updates: int = 1

    def __post_init__(self) -> None:
        if self.sampling.num_samples != 1:
            raise ConfigError("sampling.num_samples: ReMax draws 1 response a prompt")

    def rollout(self, prompts: Batch, step: int, generator: Generator | None = None) -> Joined:
        """Draws a response to each prompt, and takes the likeliest one beside it."""
        model = generator or self.actor
        roll = model.generate(prompts, self.sampling, step)
        return roll | model.greedy(prompts, self.sampling, step)

    def learn(self, roll: Batch | Future | Joined) -> dict[str, float]:
        """One step of the actor."""
        batch = roll if isinstance(roll, Batch) else roll.result()
        greedy_scores = self._greedy_scores(batch)
        batch |= Batch(old_log_probs=batch["rollout_log_probs"]) | fetched(self.score, batch)
        rewards, _ = token_rewards(batch)
        baseline = greedy_scores.to(rewards.dtype)
        gains = advantages.remax(rewards, batch["mask"], baseline)
        columns = learnt_columns(batch, gains)
        loss = partial(losses.ppo, clip=self.clip)
        metrics = self.actor.update(
            roll | columns, loss=loss, num_updates=self.num_updates,
            temperature=self.sampling.temperature,
        )  # fmt: skip
        return told(batch, metrics, greedy_reward=float(baseline.mean()))

    def _greedy_scores(self, batch: Batch) -> Tensor:
        """What the likeliest responses are worth, [rows]."""
        made = ("tokens", "lengths", "mask")
        if "greedy_tokens" not in batch:
            raise ConfigError("expected column greedy_tokens; draw responses by ReMax.rollout")
        likeliest = Batch({name: batch[f"greedy_{name}"] for name in made})
        found = fetched(self.score, batch.drop(*made) | likeliest)
        return found["rewards"].sum(1) if "rewards" in found else found["scores"]
