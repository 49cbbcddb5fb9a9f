"""The kinds of RLHF steps that the search can simulate, by name.

The kinds differ in their models and in the responses they generate: ReMax adds one greedy response
per prompt, GRPO a group of responses (HybridFlow, arXiv 2409.19256, section 2).
"""

from __future__ import annotations

from dataclasses import dataclass

from shared.registry import Registry

__all__ = ["STEPS", "StepKind"]


@dataclass(frozen=True, kw_only=True, slots=True)
class StepKind:
    """Models and responses of one step of an algorithm.

    Attributes:
        critics: names of its critics.
        has_cost: whether a cost model may score responses besides the reward model.
        has_greedy: whether it adds one greedy response per prompt, which is only scored.
        is_grouped: whether it compares the responses to one prompt, and so needs two or more.
    """

    critics: tuple[str, ...] = ()
    has_cost: bool = False
    has_greedy: bool = False
    is_grouped: bool = False


STEPS: Registry[str, StepKind] = Registry("algorithm")
STEPS.add("ppo", StepKind(critics=("critic",)), "actor and critic, advantages by GAE")
STEPS.add("grpo", StepKind(is_grouped=True), "several responses a prompt, no critic")
STEPS.add("remax", StepKind(has_greedy=True), "a greedy response a prompt as the baseline")
STEPS.add("reinforce", StepKind(), "a baseline of the batch, no critic")
STEPS.add(
    "safe_rlhf",
    StepKind(critics=("critic", "cost-critic"), has_cost=True),
    "reward held to a bound on cost, two critics",
)
