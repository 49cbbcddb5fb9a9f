"""Edges of each root drawn at random, with or without replacement."""

from __future__ import annotations

from functools import partial

from gnnflow.sampling.policy import SamplingPolicy
from shared.kernels.temporal import sample

__all__ = ["POLICY"]

POLICY = SamplingPolicy(
    sample_hop=partial(sample, policy="uniform"), is_random=True, is_newest_first=False
)
