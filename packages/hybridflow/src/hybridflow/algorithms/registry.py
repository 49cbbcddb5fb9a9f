"""Registries of the algorithms and loops that a recipe can name; recipes, checks and the CLI read them.

`ALGORITHMS.add(name, spec, about)` adds an algorithm of your own, see `AlgorithmSpec`; `LOOPS.add` a
loop, see `LoopSpec`. Entries are imported on first use, because they import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shared.registry import Registry

if TYPE_CHECKING:
    from hybridflow.algorithms.dataflow import AlgorithmSpec
    from hybridflow.algorithms.loops.loop_spec import LoopSpec

__all__ = ["ALGORITHMS", "LOOPS"]

ALGORITHMS: Registry[str, AlgorithmSpec] = Registry("algorithm")

for _name, _entry, _about in (
    ("ppo", "ppo:PPO_SPEC", "a critic's advantages and a clipped ratio"),
    ("grpo", "grpo:GRPO_SPEC", "a response against the others to its prompt"),
    ("dr-grpo", "grpo:DR_GRPO_SPEC", "GRPO without the biases of length and spread"),
    ("gspo", "grpo:GSPO_SPEC", "GRPO with the ratio of whole sequences"),
    ("cispo", "grpo:CISPO_SPEC", "GRPO with clipped weights in place of clipped losses"),
    ("rloo", "reinforce:RLOO_SPEC", "REINFORCE against the mean of the group's others"),
    ("remax", "remax:REMAX_SPEC", "REINFORCE against the greedy response"),
    ("reinforce++", "reinforce:REINFORCE_PLUS_PLUS_SPEC", "REINFORCE against the whole batch"),
    ("safe-rlhf", "safe_rlhf:SAFE_RLHF_SPEC", "PPO for reward, held to a bound on cost"),
):
    ALGORITHMS.add(_name, f"hybridflow.algorithms.{_entry}", _about)

LOOPS: Registry[str, LoopSpec] = Registry("loop.kind")

for _name, _entry, _about in (
    ("sync", "sync:SYNC_SPEC", "generate, then train"),
    ("one-step", "one_step:ONE_STEP_SPEC", "generate a batch while training on the one before"),
    ("async", "async_:ASYNC_SPEC", "generate and train at once, with bounded staleness"),
):
    LOOPS.add(_name, f"hybridflow.algorithms.loops.{_entry}", _about)
