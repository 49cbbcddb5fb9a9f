"""The newest edges of each root, newest first."""

from __future__ import annotations

from functools import partial

from gnnflow.sampling.policy import SamplingPolicy
from shared.kernels.temporal import sample

__all__ = ["POLICY"]

POLICY = SamplingPolicy(
    sample_hop=partial(sample, policy="recent"), is_random=False, is_newest_first=True
)
