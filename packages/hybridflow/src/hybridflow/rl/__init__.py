"""Pure functions of reinforcement learning on tokens: advantages, losses, divergences.

Padded tensors [batch, tokens] of responses come with a mask that is true where a token counts.
Nothing here communicates: values that ranks must agree on (`aggregate.denominator`,
`advantages.moments`, sums of metrics) are additive, so that data parallelism only has to all-reduce
them.
"""

from hybridflow.rl import advantages, aggregate, correction, kl, lagrange, losses

__all__ = ["advantages", "aggregate", "correction", "kl", "lagrange", "losses"]
