"""Algorithms, each a file of straight-line code over worker groups; copy one to change it.

An algorithm has two parts, so that loops may run them one after the other or at once: `rollout`
draws responses to prompts, and `learn` makes a training step of them.
"""

from hybridflow.algos.dataflow import Algorithm, Score
from hybridflow.algos.grpo import GRPO
from hybridflow.algos.ppo import PPO
from hybridflow.algos.reinforce import RLOO, ReinforcePlusPlus
from hybridflow.algos.remax import ReMax
from hybridflow.algos.safe_rlhf import SafeRLHF

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
