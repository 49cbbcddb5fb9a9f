"""Functions that algorithms share: rewards of tokens, and metrics of a batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from hybridflow.mapping.steps import STEPS, StepKind
from hybridflow.rl import advantages, kl
from hybridflow.roles.actor import Actor, Generator
from hybridflow.roles.critic import Critic
from hybridflow.roles.scoring import Reference
from hybridflow.rollout.sampling import Sampling
from hybridflow.tasks.containment import Interruptions
from hybridflow.workers.batch.batch import Batch
from hybridflow.workers.future import Future, Joined
from shared.errors import ConfigError, DataError

__all__ = [
    "Algorithm",
    "AlgorithmInputs",
    "AlgorithmSpec",
    "Score",
    "average_kept",
    "is_kept",
    "mask_counted",
    "measure_unmoved",
    "score_batch",
    "select_learnt",
    "summarize_step",
    "token_rewards",
]

Score = Callable[[Batch], Any]
"""Function of a rollout to a batch (or its future) with "scores" [rows] or "rewards" [rows, W].

Rows marked by a column "is_dropped" [rows] have no score, and are left out of every computation.
"""


@runtime_checkable
class Algorithm(Protocol):
    """Interface of algorithms to loops."""

    actor: Actor

    def rollout(
        self, prompts: Batch, step: int, generator: Generator | None = None
    ) -> Future | Joined:
        """Starts generating responses, by the actor or `generator`; returns without waiting."""

    def learn(self, roll: Batch | Future | Joined) -> Mapping[str, float]:
        """Runs one training step; returns its metrics."""


@dataclass(frozen=True, kw_only=True)
class AlgorithmInputs:
    """Inputs of an algorithm that a recipe provides.

    Attributes:
        actor: the model that is trained.
        score: reward of responses.
        sampling: how responses are drawn.
        num_updates: optimizer steps per training step.
        clip: how far below and above 1 a token's probability ratio may go.
        reference: model of the KL penalty; None without a penalty.
        beta: weight of the KL penalty.
        critics: critics of the algorithm's step, by name.
        cost: cost of responses; None if the step has none.
    """

    actor: Actor
    score: Score
    sampling: Sampling
    num_updates: int
    clip: tuple[float, float]
    reference: Reference | None = None
    beta: float = 0.0
    critics: Mapping[str, Critic] = field(default_factory=dict)
    cost: Score | None = None

    @property
    def common(self) -> dict[str, Any]:
        """The fields that every algorithm has, by name."""
        names = ("actor", "score", "sampling", "num_updates")
        return {name: getattr(self, name) for name in names}

    @property
    def penalty(self) -> dict[str, Any]:
        """The fields of algorithms whose rewards include a KL penalty."""
        return {"reference": self.reference, "beta": self.beta, "clip": self.clip}


@dataclass(frozen=True, kw_only=True)
class AlgorithmSpec:
    """An algorithm that recipes can name; an entry of `hybridflow.algorithms.registry`.

    Attributes:
        step: a name of `hybridflow.mapping.steps.STEPS`, which has its models and stages.
        build: makes the algorithm from a recipe's inputs.
        has_reference: whether it supports a KL penalty against a reference.
    """

    step: str
    build: Callable[[AlgorithmInputs], Algorithm]
    has_reference: bool = True

    @property
    def kind(self) -> StepKind:
        """The models and stages of its step."""
        return STEPS.get(self.step)


def score_batch(roll: Batch, score: Score, names: Sequence[str] = ("rewards", "scores")) -> Batch:
    """Computes the scores of a rollout, and returns it with their column.

    Args:
        roll: the rollout; a row that it marks as dropped stays so.
        score: function that returns at least one of the columns.
        names: accepted columns; "rewards" has a number per token, any other one per row.

    Raises:
        DataError: if the score returns none of them, a wrong shape, or a number that is not finite,
            or calls `exit`.
    """
    with Interruptions() as interruptions:
        try:
            found = score(roll)
        except SystemExit as error:
            # Left alone, it would end training with the status of a finished one.
            interruptions.raise_again()
            raise DataError(
                f"expected a reward to return scores, and it called exit({error.code!r}); mark the "
                "function with @hybridflow.reward, which counts that as an error of one sample"
            ) from error
    found = found if isinstance(found, Batch) else found.result()
    name = next((name for name in names if name in found), None)
    if name is None or len(found) != len(roll):
        raise DataError(
            f"expected a reward to return {' or '.join(map(repr, names))} for {len(roll)} rows, "
            f"got {found!r}"
        )
    shape = roll["tokens"].shape if name == "rewards" else roll["tokens"].shape[:1]
    if not isinstance(found[name], Tensor) or found[name].shape != shape:
        each = "token, as tokens are" if name == "rewards" else "row"
        raise DataError(
            f"{name}: expected a tensor {list(shape)}, one number for each {each}, got {found!r}"
        )
    finite = torch.isfinite(found[name]).reshape(len(found), -1).all(1)
    if not finite.all():
        row = int((~finite).nonzero()[0])
        raise DataError(
            f"{name}: row {row} (sample {int(roll['sample_ids'][row])}) is {found[name][row]}; "
            f"make the reward finite, or give it on_error='zero' or 'drop'"
        )
    if "is_dropped" in found:
        dropped = found["is_dropped"]
        if not isinstance(dropped, Tensor) or (dropped.dtype, dropped.dim()) != (torch.bool, 1):
            raise DataError(f"is_dropped: expected bool [{len(roll)}], got {found!r}")
        found = found.drop("is_dropped") | Batch(is_dropped=dropped | ~is_kept(roll))
        roll = roll.drop("is_dropped")
    return roll | found


def is_kept(batch: Batch) -> Tensor:
    """Rows that are not dropped, bool [rows]."""
    if "is_dropped" in batch:
        return ~batch["is_dropped"]
    return torch.ones(len(batch), dtype=torch.bool)


def mask_counted(batch: Batch) -> Tensor:
    """The mask [rows, W] of generated tokens in rows that are not dropped."""
    return batch["mask"] & is_kept(batch)[:, None]


def average_kept(values: Tensor, batch: Batch) -> float:
    """Mean of values [rows] over rows that are not dropped; 0 if all are."""
    kept = values[is_kept(batch)].double()
    return float(kept.sum() / max(1, len(kept)))


def token_rewards(
    batch: Batch, *, beta: float = 0.0, kind: str = "k1", score: str = "scores"
) -> tuple[Tensor, Tensor | None]:
    """The reward of each token, minus the KL penalty.

    Args:
        batch: a rollout with "rewards" [rows, W], or with scores [rows] for the last token, and
            with "ref_log_probs" if there is a penalty.
        beta: weight of the penalty.
        kind: estimator of the divergence, a name of `hybridflow.rl.kl`.
        score: name of the column of scores.

    Returns:
        Rewards [rows, W], and the divergence of each token if there is a reference.
    """
    divergence = None
    if "ref_log_probs" in batch:
        ours, reference = batch["old_log_probs"], batch["ref_log_probs"]
        divergence = kl.estimate(ours, reference, batch["mask"], kind=kind)
    elif beta:
        raise ConfigError("beta: a KL penalty needs a reference, got none; pass `reference`")
    if "rewards" in batch and score == "scores":
        rewards = batch["rewards"].to(batch["old_log_probs"].dtype)
        return (rewards if divergence is None else rewards - beta * divergence), divergence
    scores = batch[score].to(batch["old_log_probs"].dtype)
    return advantages.token_rewards(scores, batch["mask"], divergence, beta), divergence


def select_learnt(batch: Batch, **columns: Tensor) -> Batch:
    """Columns of an update besides the rollout's; dropped rows get weight 0."""
    if "is_dropped" in batch:
        columns["is_dropped"] = batch["is_dropped"]
    return Batch(columns)


def measure_unmoved(gains: Tensor, group: Tensor) -> float:
    """Share of groups without a gradient: all advantages are 0, or at most one response is left.

    Args:
        gains: advantages [rows].
        group: ids [rows].
    """
    ids, index = group.unique(return_inverse=True)
    largest = gains.new_zeros(len(ids)).scatter_reduce(0, index, gains.abs(), "amax")
    return float((largest == 0).double().mean())


def summarize_step(batch: Batch, metrics: Mapping[str, float], **more: float) -> dict[str, float]:
    """Metrics of a step: of the batch, of the actor's update, and any others given."""
    rewards = batch["rewards"].sum(1) if "rewards" in batch else batch["scores"]
    if "is_dropped" in batch:
        more["num_dropped"] = float(batch["is_dropped"].sum())
    return {
        "reward": average_kept(rewards, batch),
        "response_length": average_kept(batch["mask"].sum(1), batch),
        **metrics,
        **more,
    }
