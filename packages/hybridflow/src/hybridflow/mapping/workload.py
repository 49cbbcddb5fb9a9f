"""The workload of one step of an RLHF algorithm: sequences, tokens, updates.

A step generates, prepares (one forward pass of every model that scores) and trains, after the
stages of HybridFlow (arXiv 2409.19256). `hybridflow.mapping.steps` lists the algorithms.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields

from hybridflow.mapping.models import ModelSpec
from hybridflow.mapping.steps import STEPS, StepKind
from shared.errors import ConfigError

__all__ = ["STAGES", "Workload"]

STAGES = ("generate", "prepare", "train")
"""The stages of a step, in order."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """One step.

    Attributes:
        algorithm: a name of `STEPS`; determines critics, cost models and greedy responses.
        global_batch_size: sequences that a step trains on, including all of a group.
        prompt_tokens: tokens of each prompt.
        response_tokens: tokens of each response; all have this length.
        num_updates: optimizer steps (mini-batches) per step.
        num_epochs: number of times each sequence is trained on.
        micro_batch_tokens: most tokens of one forward pass of a replica, but at least one sequence.
        group_size: responses to one prompt, which is prefilled once for all of them.
        recomputes_log_probs: whether the actor too runs a forward pass before training.
    """

    algorithm: str = "ppo"
    global_batch_size: int = 1024
    prompt_tokens: int = 1024
    response_tokens: int = 1024
    num_updates: int = 8
    num_epochs: int = 1
    micro_batch_tokens: int = 4096
    group_size: int = 1
    recomputes_log_probs: bool = False

    def __post_init__(self) -> None:
        STEPS.check(self.algorithm)
        for item in fields(self)[1:8]:
            value = getattr(self, item.name)
            if value < 1:
                raise ConfigError(f"workload.{item.name}: expected at least 1, got {value}")
        if self.global_batch_size % self.group_size:
            raise ConfigError(
                f"workload.global_batch_size: expected whole groups of {self.group_size} "
                f"responses, got {self.global_batch_size} sequences"
            )
        if self.kind.is_grouped and self.group_size == 1:
            raise ConfigError(
                f"workload.group_size: {self.algorithm} compares the responses to one prompt; expected "
                "at least 2, got 1"
            )
        if self.num_updates > self.global_batch_size * self.num_epochs:
            raise ConfigError(
                f"workload.num_updates: expected at most one update a sequence, "
                f"{self.global_batch_size * self.num_epochs}, got {self.num_updates}"
            )

    @property
    def kind(self) -> StepKind:
        """Models and responses of the algorithm's step."""
        return STEPS.get(self.algorithm)

    @property
    def sequence_tokens(self) -> int:
        """Tokens of a prompt and its response."""
        return self.prompt_tokens + self.response_tokens

    @property
    def sequences_per_update(self) -> int:
        """Sequences of one mini-batch, rounded up."""
        return -(-self.global_batch_size * self.num_epochs // self.num_updates)

    @property
    def num_greedy(self) -> int:
        """Greedy responses besides the sampled ones; they are generated and scored only."""
        return self.global_batch_size // self.group_size if self.kind.has_greedy else 0

    @property
    def num_generated(self) -> int:
        """Sequences that the actor generates."""
        return self.global_batch_size + self.num_greedy

    def num_prepared(self, model: ModelSpec) -> int:
        """Sequences of the model's forward passes in the preparation stage."""
        if model.role == "actor":
            return self.global_batch_size if self.recomputes_log_probs else 0
        return self.num_generated if model.role in ("reward", "cost") else self.global_batch_size

    def max_dp(self, model: ModelSpec) -> int:
        """Most replicas such that each has a sequence."""
        return self.sequences_per_update if model.is_trained else self.global_batch_size

    def check(self, models: Sequence[ModelSpec]) -> None:
        """Refuse models that the algorithm does not have.

        A reference, reward or cost model may be missing: a KL weight of zero or a reward function
        needs none.

        Raises:
            ConfigError: names repeat, there is not one actor, the critics are too many or too few,
                or a cost model comes with an algorithm that has none.
        """
        names = [model.name for model in models]
        if len(set(names)) < len(names):
            raise ConfigError(f"models: expected a name of its own for each, got {names}")
        roles = Counter(model.role for model in models)
        expected = {"actor": 1, "critic": len(self.kind.critics)}
        for role, number in expected.items():
            if roles[role] != number:
                raise ConfigError(
                    f"models: expected {number} of role {role!r} for {self.algorithm}, got "
                    f"{roles[role]} among {names}"
                )
        if roles["cost"] and not self.kind.has_cost:
            known = ", ".join(repr(name) for name in STEPS if STEPS.get(name).has_cost)
            raise ConfigError(
                f"models: expected no cost model for {self.algorithm}, got {names}; it belongs to "
                f"algorithm {known}"
            )
