"""A model as recipes know it: how it is built, and what is sampled for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from torch import nn

__all__ = ["ModelEntry", "ModelSizes"]


class ModelSizes(NamedTuple):
    """Sizes that a recipe gives a model.

    Attributes:
        dim: columns of embeddings.
        edge_dim: columns of edge features; 0 for none.
        num_hops: hops that are sampled.
        num_blocks: blocks of a Transformer.
    """

    dim: int
    edge_dim: int
    num_hops: int
    num_blocks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelEntry:
    """A model as recipes build it.

    Attributes:
        build: makes it of its sizes.
        fanouts: neighbours a hop, as published.
        policy: name of the sampling policy, as published.
        num_snapshots: windows of time that it reads, each a tenth of the stream.
        max_hops: hops that it can read; None for any number.
    """

    build: Callable[[ModelSizes], nn.Module]
    fanouts: tuple[int, ...]
    policy: str
    num_snapshots: int = 1
    max_hops: int | None = None
