"""What is learnt from responses that other weights have drawn.

Decoupled from the sampler as in AReaL (arXiv 2505.24298): the trainer's present weights are what the
update is held near, and each token weighs as the ratio of the two, truncated. Without this, the
update is held near the weights that drew, which algorithms take from the rollout by themselves.
"""

from __future__ import annotations

from dataclasses import dataclass

from hybridflow.rl import correction
from hybridflow.roles.actor import Actor
from hybridflow.workers.batch.batch import Batch
from hybridflow.workers.future import Future, Joined

__all__ = ["Correction"]


@dataclass(frozen=True, kw_only=True)
class Correction:
    """Weighs a rollout's tokens by how likely the actor now is to draw them.

    Attributes:
        actor: who is trained.
        temperature: that responses were drawn at.
        level: "token" or "sequence"; see `hybridflow.rl.correction`.
        cap: the most a token can weigh.
    """

    actor: Actor
    temperature: float = 1.0
    level: str = "token"
    cap: float = 2.0

    def __call__(self, roll: Batch | Future | Joined) -> Batch:
        """The rollout, corrected.

        Returns:
            The same with rollout_log_probs by the actor, which algorithms go out from, those of
            the sampler as sampler_log_probs, and loss_weights.

        Raises:
            ConfigError: if the level or the cap is not one.
        """
        asked = self.actor.log_probs(roll, self.temperature)
        batch = roll if isinstance(roll, Batch) else roll.result()
        ours, theirs = asked["log_probs"], batch["rollout_log_probs"]
        weights = correction.weights(ours, theirs, batch["mask"], level=self.level, cap=self.cap)
        return batch.drop("rollout_log_probs") | Batch(
            rollout_log_probs=ours, sampler_log_probs=theirs, loss_weights=weights
        )
