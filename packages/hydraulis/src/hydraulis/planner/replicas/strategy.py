"""Strategies in words, as "tp2pp2+tp1+tp1", and the ranks that each of their replicas takes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from jaxtyping import Int

from hydraulis.config import Cost
from hydraulis.planner.proposals import ReplicaShape
from shared.errors import ConfigError

__all__ = ["rank_grids", "read_strategy", "stage_layers"]

_DEGREE = re.compile(r"(tp|pp|cp|ring|ulysses)(\d+)")


def read_strategy(
    text: str, *, cost: Cost, max_tokens: int, num_layers: int, message_s: float = 0.0
) -> tuple[ReplicaShape, ...]:
    """Replicas of a strategy, in the order of their ranks.

    A rank's seconds are its share of the whole model's; the stage with most layers is the slowest.

    Args:
        text: replicas joined by "+"; of each the degrees above 1, of tp, pp, ring (or cp) and ulysses,
            or "tp1".
        cost: seconds of a micro-batch on one rank.
        max_tokens: most tokens that a rank holds; tensor-parallel ranks hold the same tokens.
        num_layers: decoder layers of the model.
        message_s: seconds of messages for each token of a document that lies over several ranks.

    Raises:
        ConfigError: the text is no strategy.
    """
    return tuple(
        _read_shape(one, text, cost, max_tokens, num_layers, message_s) for one in text.split("+")
    )


def _read_shape(
    text: str, strategy: str, cost: Cost, max_tokens: int, num_layers: int, message_s: float
) -> ReplicaShape:
    found = [("ring" if name == "cp" else name, int(n)) for name, n in _DEGREE.findall(text)]
    degrees = dict(found)
    is_whole = "".join(f"{m[1]}{m[2]}" for m in _DEGREE.finditer(text)) == text
    if not text or not is_whole or len(degrees) < len(found) or min(degrees.values()) < 1:
        raise ConfigError(
            f"strategy: expected replicas joined by '+', each of different degrees above 0 of tp, pp, "
            f"ring (or cp) and ulysses, as 'tp2+pp2+ring2ulysses2', got {text!r} in {strategy!r}"
        )
    pp = degrees.get("pp", 1)
    tokens_over = degrees.get("ring", 1) * degrees.get("ulysses", 1)
    slowest = len(max(stage_layers(num_layers, pp), key=len)) / num_layers
    share = slowest / (degrees.get("tp", 1) * tokens_over)
    return ReplicaShape(
        **degrees,
        cost=Cost(
            a=cost.a * share, b=cost.b * share + (message_s if tokens_over > 1 else 0.0), c=cost.c
        ),
        cap=max_tokens * tokens_over,
    )


def rank_grids(shapes: Sequence[ReplicaShape]) -> tuple[Int[np.ndarray, "pp ring ulysses tp"], ...]:
    """Ranks of each replica: consecutive ones, tensor-parallel ranks nearest and stages farthest."""
    found, first = [], 0
    for shape in shapes:
        ranks = np.arange(first, first + shape.num_ranks)
        found.append(ranks.reshape(shape.pp, shape.ring, shape.ulysses, shape.tp))
        first += shape.num_ranks
    return tuple(found)


def stage_layers(num_layers: int, stages: int) -> list[range]:
    """Layers of each pipeline stage: consecutive ones, as evenly as they can be cut."""
    bounds = [num_layers * stage // stages for stage in range(stages + 1)]
    return [range(low, high) for low, high in pairwise(bounds)]
