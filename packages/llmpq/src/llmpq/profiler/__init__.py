"""Measures: seconds of layers, links, and how much rounding costs."""

from typing import Any

from shared.registry import Registry

__all__ = ["SENSITIVITIES"]

_WAYS = "llmpq.profiler.sensitivity"

SENSITIVITIES: Registry[str, Any] = Registry("sensitivity")
"""Functions of (model, matrices by layer, batches, bits, group size, seed) that return noise
[layer, width]."""
SENSITIVITIES.add("fisher", f"{_WAYS}:by_fisher", "squared gradients; nats, in seconds")
SENSITIVITIES.add("variance", f"{_WAYS}:by_variance", "LLM-PQ's indicator, in units of its own")
SENSITIVITIES.add("kl", f"{_WAYS}:by_kl", "measured, a layer and width at a time: nats, slow")
SENSITIVITIES.add("int8", f"{_WAYS}:by_int8", "what products in 8 bits add: nats, slow")
SENSITIVITIES.add("random", f"{_WAYS}:by_random", "draws, for comparison")
