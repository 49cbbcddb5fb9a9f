"""Layouts of one model on the GPUs of its set: pipeline, tensor and data parallelism.

A model uses all GPUs of its set, so the product of its degrees is the set's size. Tensor groups
stay within a host and split heads evenly. The actor generates in another layout on the same GPUs,
with fewer and larger shards (p_g divides p and t_g divides t), which gives d_g = p t / (p_g t_g)
generation replicas per training replica: HybridFlow's 3D-HybridEngine (arXiv 2409.19256).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from hybridflow.mapping.models import ModelSpec
from hybridflow.workers.batch.layout import Layout

__all__ = ["GenerationLayout", "generation_layouts", "layer_share", "layouts"]


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationLayout:
    """Degrees of one generation replica.

    Attributes:
        pp: pipeline stages.
        tp: ranks that share each layer.
    """

    pp: int
    tp: int

    def __str__(self) -> str:
        return f"{self.pp}-{self.tp}"


def layer_share(layout: Layout, model: ModelSpec) -> float:
    """Share of a model's layers in the largest stage of a layout."""
    return math.ceil(model.num_layers / layout.pp) / model.num_layers


def layouts(model: ModelSpec, num_gpus: int, devices_per_host: int, max_dp: int) -> list[Layout]:
    """Every layout of a model on all of `num_gpus` GPUs.

    Args:
        model: the model to lay out.
        num_gpus: GPUs of the set.
        devices_per_host: GPUs per host; t divides it, so that no tensor group spans two hosts.
        max_dp: most replicas.

    Returns:
        Layouts with t | heads, p <= layers and d <= max_dp, ordered by t and then p; may be empty.
    """
    found = []
    for tp in _divisors(math.gcd(num_gpus, devices_per_host, model.num_heads)):
        for pp in _divisors(num_gpus // tp):
            dp = num_gpus // (tp * pp)
            if pp <= model.num_layers and dp <= max_dp:
                found.append(Layout(pp=pp, tp=tp, dp=dp))
    return found


def generation_layouts(layout: Layout) -> list[GenerationLayout]:
    """Every generation layout whose shards are unions of a training layout's shards."""
    return [
        GenerationLayout(pp=pp, tp=tp) for tp in _divisors(layout.tp) for pp in _divisors(layout.pp)
    ]


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]
