"""Replay policies by name: which past events are trained on again with an increment.

An entry is called as `entry(share, seed=seed)` and gives a `gnnflow.training.replay.ReplayPolicy`. To
add one, write its class in a file of its own, register it here, and test it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from shared.registry import Registry

if TYPE_CHECKING:
    from gnnflow.training.replay import ReplayPolicy

__all__ = ["REPLAY_POLICIES", "MakeReplay"]


class MakeReplay(Protocol):
    """Makes a policy."""

    def __call__(self, share: float, *, seed: int) -> ReplayPolicy:
        """Makes a policy.

        Args:
            share: number of events drawn, as a share of past events.
            seed: seed of the draws.
        """
        ...


# Registered by import path, so that the command line's help does not import torch.
REPLAY_POLICIES: Registry[str, MakeReplay] = Registry("replay policy")
REPLAY_POLICIES.add(
    "uniform", "gnnflow.training.replay:UniformReplay", "all past events are equally likely"
)
REPLAY_POLICIES.add(
    "structure",
    "gnnflow.training.replay:StructureReplay",
    "events of degrees that are frequent in the increment are likelier",
)
