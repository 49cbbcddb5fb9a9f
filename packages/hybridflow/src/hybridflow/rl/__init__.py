"""Pure functions of reinforcement learning on tokens: advantages, losses, divergences.

Padded tensors [batch, tokens] of responses come with a mask that is true where a token counts.
Nothing here communicates: values that ranks must agree on (`aggregate.denominator`,
`advantages.moments`, sums of metrics) are additive, so that data parallelism only has to all-reduce
them.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hybridflow.rl import advantages, aggregate, correction, kl, lagrange, losses

__all__ = ["advantages", "aggregate", "correction", "kl", "lagrange", "losses"]


def __getattr__(name: str) -> Any:
    # Lazy, because recipes read only the registry, and these import torch.
    if name not in __all__:
        raise AttributeError(f"module 'hybridflow.rl' has no attribute {name!r}")
    return import_module(f"hybridflow.rl.{name}")
