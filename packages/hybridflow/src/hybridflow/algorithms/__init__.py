"""Algorithms, each a file of straight-line code over worker groups; copy one to change it.

An algorithm has two parts, so that loops may run them one after the other or at once: `rollout`
draws responses to prompts, and `learn` makes a training step of them.
"""

from hybridflow.algorithms.dataflow import Algorithm, Score
from hybridflow.algorithms.grpo import GRPO
from hybridflow.algorithms.ppo import PPO
from hybridflow.algorithms.reinforce import RLOO, ReinforcePlusPlus
from hybridflow.algorithms.remax import ReMax
from hybridflow.algorithms.safe_rlhf import SafeRLHF

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
