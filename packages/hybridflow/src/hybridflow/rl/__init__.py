"""What reinforcement learning from feedback computes on tokens, as pure functions.

Padded tensors [batch, tokens] of responses come with a mask that is true where a token counts.
Nothing here communicates: what ranks must agree on (`aggregate.denominator`, `advantages.moments`,
sums of metrics) is additive, so that an all-reduce of it is all that data parallelism needs.
"""

from hybridflow.rl import advantages, aggregate, correction, kl, lagrange, losses

__all__ = ["advantages", "aggregate", "correction", "kl", "lagrange", "losses"]
