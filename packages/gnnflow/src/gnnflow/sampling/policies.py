"""The sampling policies by name.

To add one, write its file with a `SamplingPolicy`, register it here, and test it. Its function may
read the columns of the adjacency itself, or choose among the edges that `shared.kernels.temporal`'s
kernels give it. Kernels of its own, for CPU and GPU, belong in that folder of `shared`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shared.registry import Registry

if TYPE_CHECKING:
    from gnnflow.sampling.policy import SamplingPolicy

__all__ = ["SAMPLING_POLICIES"]

# Registered by import path, so that the command line's help does not import torch.
SAMPLING_POLICIES: Registry[str, SamplingPolicy] = Registry("sampling policy")
SAMPLING_POLICIES.add("recent", "gnnflow.sampling.recent:POLICY", "the newest, newest first")
SAMPLING_POLICIES.add("uniform", "gnnflow.sampling.uniform:POLICY", "drawn at random")
