"""Off-policy correction: training on responses that other weights have generated.

The decoupled objective of AReaL (arXiv 2505.24298): the proximal policy is the actor's current one,
and each token has the truncated ratio of current to sampling probability as its weight. Without the
correction, the proximal policy is the one that generated the responses.
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
    """Adds importance weights of the actor's current weights to a rollout.

    Attributes:
        actor: the model that is trained.
        temperature: at which responses were sampled.
        level: a name of `hybridflow.rl.registry.LEVELS`.
        cap: upper bound of a token's weight.
    """

    actor: Actor
    temperature: float = 1.0
    level: str = "token"
    cap: float = 2.0

    def __call__(self, roll: Batch | Future | Joined) -> Batch:
        """Corrects a rollout.

        Returns:
            The rollout with the actor's log-probabilities as rollout_log_probs, which algorithms
            use as the old ones, the sampler's as sampler_log_probs, and with loss_weights.

        Raises:
            ConfigError: if the level or the cap is not valid.
        """
        asked = self.actor.log_probs(roll, self.temperature)
        batch = roll if isinstance(roll, Batch) else roll.result()
        ours, theirs = asked["log_probs"], batch["rollout_log_probs"]
        weights = correction.weights(ours, theirs, batch["mask"], level=self.level, cap=self.cap)
        return batch.drop("rollout_log_probs") | Batch(
            rollout_log_probs=ours, sampler_log_probs=theirs, loss_weights=weights
        )
