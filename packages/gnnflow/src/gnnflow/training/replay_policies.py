"""The policies of replay by name: which past events are trained on again with an increment.

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
            share: events that are drawn, over the number of past events.
            seed: of the draws.
        """
        ...


# Named by their place: the command line's help needs the names alone, and no torch.
REPLAY_POLICIES: Registry[str, MakeReplay] = Registry("replay policy")
REPLAY_POLICIES.add(
    "uniform", "gnnflow.training.replay:UniformReplay", "all past events are equally likely"
)
REPLAY_POLICIES.add(
    "structure",
    "gnnflow.training.replay:StructureReplay",
    "degrees as the increment's are likelier",
)
