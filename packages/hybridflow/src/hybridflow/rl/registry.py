"""Registry of the levels at which importance weights correct; recipes and `rl.correction` read it.

Entries are imported on first use, because they import torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from shared.registry import Registry

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["LEVELS"]

LEVELS: Registry[str, Callable[[Tensor], Tensor]] = Registry("level")
"""By name, a function from log-ratios [batch, tokens], 0 where masked, to those of the level."""
LEVELS.add("token", "hybridflow.rl.correction:token_level", "the ratio of each token")
LEVELS.add("sequence", "hybridflow.rl.correction:sequence_level", "the product over its sequence")
