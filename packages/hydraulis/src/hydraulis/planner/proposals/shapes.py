"""Shapes of replicas: parallel degrees with what a micro-batch costs and holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hydraulis.config import Cost, Replica
from shared.errors import ConfigError

__all__ = ["ReplicaShape", "exclusions"]


@dataclass(frozen=True, kw_only=True)
class ReplicaShape:
    """How the ranks of one replica share the model and its sequences.

    Attributes:
        tp: tensor-parallel ranks.
        pp: pipeline stages.
        ring: ranks of ring attention.
        ulysses: ranks of Ulysses attention.
        cost: seconds of a micro-batch on the slowest stage.
        cap: most tokens in a micro-batch; 0 where states alone do not fit.

    Raises:
        ConfigError: a degree below 1, or a negative cap.
    """

    tp: int = 1
    pp: int = 1
    ring: int = 1
    ulysses: int = 1
    cost: Cost
    cap: int

    def __post_init__(self) -> None:
        for name, least in (("tp", 1), ("pp", 1), ("ring", 1), ("ulysses", 1), ("cap", 0)):
            if getattr(self, name) < least:
                raise ConfigError(
                    f"ReplicaShape.{name}: expected at least {least}, got {getattr(self, name)}"
                )

    @property
    def num_ranks(self) -> int:
        """Ranks of the replica."""
        return self.tp * self.pp * self.ring * self.ulysses

    @property
    def replica(self) -> Replica:
        """What sequences are dispatched to."""
        return Replica(cost=self.cost, cap=self.cap, stages=self.pp)

    def __str__(self) -> str:
        degrees = {name: getattr(self, name) for name in ("tp", "pp", "ring", "ulysses")}
        return "".join(f"{name}{one}" for name, one in degrees.items() if one > 1) or "tp1"


def exclusions(
    shapes: Sequence[ReplicaShape],
    num_ranks: int,
    *,
    num_heads: int | None = None,
    num_kv_heads: int | None = None,
    num_layers: int | None = None,
    vocab: int | None = None,
) -> dict[ReplicaShape, str]:
    """The shapes that cannot run, each with its reason.

    Args:
        shapes: of replicas.
        num_ranks: ranks in all.
        num_heads: attention heads of the model; None leaves them unchecked.
        num_kv_heads: its key heads; None leaves them unchecked.
        num_layers: layers of the model; None leaves them unchecked.
        vocab: tokens of its vocabulary, whose rows tensor-parallel ranks share; None leaves it
            unchecked.
    """
    found = {}
    for shape in shapes:
        if shape.num_ranks > num_ranks:
            found[shape] = f"takes {shape.num_ranks} ranks of {num_ranks}"
        elif not shape.cap:
            found[shape] = "has no memory for tokens beside its states"
        elif num_heads is not None and num_heads % (shape.tp * shape.ulysses):
            found[shape] = f"cannot share {num_heads} heads among {shape.tp * shape.ulysses} ranks"
        elif num_kv_heads is not None and num_kv_heads % shape.tp:
            found[shape] = f"cannot share {num_kv_heads} key heads among {shape.tp} ranks"
        elif num_kv_heads is not None and not _deals(num_kv_heads // shape.tp, shape.ulysses):
            heads = num_kv_heads // shape.tp
            found[shape] = f"cannot deal {heads} key heads to {shape.ulysses} ranks of Ulysses"
        elif vocab is not None and -(-vocab // shape.tp) * (shape.tp - 1) >= vocab:
            found[shape] = f"leaves a rank without any of {vocab} tokens of the vocabulary"
        elif num_layers is not None and num_layers < shape.pp:
            found[shape] = f"has more stages than the model has layers, {num_layers}"
    return found


def _deals(num_heads: int, ranks: int) -> bool:
    """Whether key heads can be dealt to ranks, each to one or to as many ranks as any other."""
    return not num_heads % ranks or not ranks % num_heads
