"""Algorithms, each a file of straight-line code over worker groups; copy one to change it.

An algorithm has two parts, which loops run in turn or at once: `rollout` generates responses to
prompts, and `learn` runs a training step on them.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hybridflow.algorithms.dataflow import Algorithm, Score
    from hybridflow.algorithms.grpo import GRPO
    from hybridflow.algorithms.ppo import PPO
    from hybridflow.algorithms.reinforce import RLOO, ReinforcePlusPlus
    from hybridflow.algorithms.remax import ReMax
    from hybridflow.algorithms.safe_rlhf import SafeRLHF

_HOME_OF = {
    "GRPO": "grpo",
    "PPO": "ppo",
    "RLOO": "reinforce",
    "Algorithm": "dataflow",
    "ReMax": "remax",
    "ReinforcePlusPlus": "reinforce",
    "SafeRLHF": "safe_rlhf",
    "Score": "dataflow",
}

__all__ = [
    "GRPO",
    "PPO",
    "RLOO",
    "Algorithm",
    "ReMax",
    "ReinforcePlusPlus",
    "SafeRLHF",
    "Score",
]


def __getattr__(name: str) -> Any:
    # Lazy, because the command line reads only the registry, and these import torch.
    if name not in _HOME_OF:
        raise AttributeError(f"module 'hybridflow.algorithms' has no attribute {name!r}")
    return getattr(import_module(f"hybridflow.algorithms.{_HOME_OF[name]}"), name)
