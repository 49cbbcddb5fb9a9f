"""What algorithms share: how rewards reach tokens, and what is told of a batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from hybridflow.actor import Actor, Generator
from hybridflow.batch import Batch
from hybridflow.future import Future, Joined
from hybridflow.rl import advantages, kl
from shared.errors import ConfigError, DataError

__all__ = ["Algorithm", "Score", "fetched", "learnt_columns", "token_rewards", "told"]

Score = Callable[[Batch], Any]
"""From a rollout to a batch (or the future of one) with "scores" [rows] or "rewards" [rows, W]."""


@runtime_checkable
class Algorithm(Protocol):
    """What loops run."""

    actor: Actor

    def rollout(
        self, prompts: Batch, step: int, generator: Generator | None = None
    ) -> Future | Joined:
        """Draws responses to prompts, by the actor or who else has its weights; waits for nothing."""

    def learn(self, roll: Batch | Future | Joined) -> Mapping[str, float]:
        """One training step."""


def fetched(score: Score, roll: Batch) -> Batch:
    """What a score makes of a rollout, waited for.

    Raises:
        DataError: if it gives neither scores nor rewards, or not one a row, or one is not finite.
    """
    found = score(roll)
    found = found if isinstance(found, Batch) else found.result()
    name = "rewards" if "rewards" in found else "scores"
    if name not in found or len(found) != len(roll):
        raise DataError(
            f"expected a reward to give 'scores' or 'rewards' for {len(roll)} rows, got {found!r}"
        )
    finite = torch.isfinite(found[name]).reshape(len(found), -1).all(1)
    if not finite.all():
        row = int((~finite).nonzero()[0])
        raise DataError(
            f"{name}: row {row} (sample {int(roll['sample_ids'][row])}) is {found[name][row]}; "
            f"make the reward finite, or give it on_error='zero' or 'drop'"
        )
    return found


def token_rewards(
    batch: Batch, *, beta: float = 0.0, kind: str = "k1", score: str = "scores"
) -> tuple[Tensor, Tensor | None]:
    """The reward of each token, less the penalty for leaving the reference.

    Args:
        batch: a rollout with "rewards" [rows, W] or scores [rows] of the last token, and with
            "ref_log_probs" where there is a penalty.
        beta: weight of the penalty.
        kind: its estimate.
        score: name of the column of scores.

    Returns:
        Rewards [rows, W], and the divergence of each token if there is a reference.
    """
    divergence = None
    if "ref_log_probs" in batch:
        ours, reference = batch["old_log_probs"], batch["ref_log_probs"]
        divergence = kl.estimate(ours, reference, batch["mask"], kind=kind)
    elif beta:
        raise ConfigError("a penalty for leaving the reference needs one; give `reference`")
    if "rewards" in batch and score == "scores":
        rewards = batch["rewards"].to(batch["old_log_probs"].dtype)
        return (rewards if divergence is None else rewards - beta * divergence), divergence
    scores = batch[score].to(batch["old_log_probs"].dtype)
    return advantages.token_rewards(scores, batch["mask"], divergence, beta), divergence


def learnt_columns(batch: Batch, gains: Tensor) -> Batch:
    """What an actor's update wants beside the rollout; dropped rows have no weight in it."""
    columns = Batch(advantages=gains, old_log_probs=batch["old_log_probs"])
    if "is_dropped" in batch:
        columns["is_dropped"] = batch["is_dropped"]
    return columns


def told(batch: Batch, metrics: Mapping[str, float], **more: float) -> dict[str, float]:
    """What a step says: of the batch, of the actor's update, and whatever else is given."""
    mask = batch["mask"]
    rewards = batch["rewards"].sum(1) if "rewards" in batch else batch["scores"]
    return {
        "reward": float(rewards.float().mean()),
        "response_length": float(mask.sum(1).float().mean()),
        **metrics,
        **more,
    }
