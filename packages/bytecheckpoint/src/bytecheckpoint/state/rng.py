"""The states of all random number generators of a rank."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

__all__ = ["RngSnapshot", "RngState", "rng_state"]


class RngState:
    """Python's, numpy's and torch's default generators, captured when saved, set when loaded.

    Each rank has its own. On another number of ranks, rank r loads the state of saved rank r;
    additional ranks are seeded from rank 0's state and their own number.
    """

    per_rank = True

    def state_dict(self) -> dict[str, Any]:
        """The current states of the generators."""
        version, numbers, gauss = random.getstate()
        name, keys, at, has_gauss, cached = np.random.get_state()
        state: dict[str, Any] = {
            "python": {"version": version, "numbers": np.array(numbers), "gauss": gauss},
            "numpy": {
                "name": name,
                "keys": np.array(keys).astype(np.int64),
                "at": at,
                "has_gauss": has_gauss,
                "cached": cached,
            },
            "torch": torch.get_rng_state(),
        }
        if torch.cuda.is_available():
            state["cuda"] = torch.cuda.get_rng_state()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Sets the generators."""
        python, numpy = state["python"], state["numpy"]
        random.setstate((python["version"], tuple(python["numbers"].tolist()), python["gauss"]))
        np.random.set_state(
            (
                numpy["name"],
                np.asarray(numpy["keys"]).astype(np.uint32),
                numpy["at"],
                numpy["has_gauss"],
                numpy["cached"],
            )
        )
        torch.set_rng_state(state["torch"].cpu())
        if "cuda" in state and torch.cuda.is_available():
            torch.cuda.set_rng_state(state["cuda"].cpu())

    def load_rank_states(self, states: list[dict[str, Any]], rank: int, world_size: int) -> None:
        """Sets the generators from a save by another number of ranks."""
        self.load_state_dict(states[min(rank, len(states) - 1)])
        if rank >= len(states):
            seed = random.getrandbits(32) + rank
            random.seed(seed)
            np.random.seed(seed % 2**32)
            torch.manual_seed(seed)


def rng_state() -> RngState:
    """An object to put into a state, so that a resumed run continues the same random numbers."""
    return RngState()


class RngSnapshot(RngState):
    """The generators' states at one moment: saved in place of the current ones, set by `restore`."""

    def __init__(self) -> None:
        self._state = super().state_dict()

    def state_dict(self) -> dict[str, Any]:
        """The states of that moment."""
        return self._state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Replaces the snapshot; the generators stay as they are."""
        self._state = state

    def load_rank_states(self, states: list[dict[str, Any]], rank: int, world_size: int) -> None:
        """Replaces the snapshot from a save by another number of ranks."""
        current = RngState()
        before = current.state_dict()
        current.load_rank_states(states, rank, world_size)
        self._state = current.state_dict()
        current.load_state_dict(before)

    def restore(self) -> None:
        """Sets the generators."""
        super().load_state_dict(self._state)
