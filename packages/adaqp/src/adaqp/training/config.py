"""Settings of a training run: the same dataclasses in Python and on the command line.

This module imports neither torch nor numba, so that `adaqp --help` answers at once.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from shared.errors import ConfigError

if TYPE_CHECKING:
    from torch import nn

    from adaqp.messages.distgraph import DistGraph
    from adaqp.policy import Policy

__all__ = ["POLICY_NAMES", "ModelConfig", "PolicyConfig", "RunConfig"]

PolicyName = Literal["exact", "exact-no-overlap", "fixed", "adaptive", "stale", "drop"]
POLICY_NAMES: tuple[PolicyName, ...] = (
    "exact-no-overlap",
    "exact",
    "fixed",
    "adaptive",
    "stale",
    "drop",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """A stack of graph layers.

    Args:
        conv: kind of layer.
        hidden: width of the hidden layers (for gat a multiple of 4).
        layers: number of layers.
        norm: normalisation between layers.
        dropout: share of hidden values dropped in training.
    """

    conv: Literal["gcn", "sage", "gin", "gat"] = "gcn"
    hidden: int = 128
    layers: int = 3
    norm: Literal["layer", "none"] = "layer"
    dropout: float = 0.5

    def __post_init__(self) -> None:
        if self.hidden < 1 or self.layers < 1:
            raise ConfigError(
                f"model.hidden and model.layers must be 1 or more, got {self.hidden} and "
                f"{self.layers}"
            )
        if not 0 <= self.dropout < 1:
            raise ConfigError(f"model.dropout must be in [0, 1), got {self.dropout}")

    def build(self, dg: "DistGraph") -> "nn.Module":
        """The model for a rank's share, in its features' dtype and on their device."""
        from adaqp.training import nn

        dims = [dg.feat.shape[1], *[self.hidden] * (self.layers - 1), dg.num_classes]
        norm = None if self.norm == "none" else self.norm
        model = getattr(nn, self.conv)(dg, dims, norm=norm, dropout=self.dropout)
        return model.to(device=dg.feat.device, dtype=dg.feat.dtype)


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyConfig:
    """How messages travel.

    Args:
        name: "exact" (overlapped), "exact-no-overlap" (the plain way), "fixed" at `width` bits,
            "adaptive" among `bits`, "stale" (last step's messages), or "drop" (none at all).
        width: bits of the fixed policy.
        bits: widths the adaptive policy chooses from.
        lam: adaptive: weight of variance against time, 0 to 1.
        every: adaptive: steps between assignments.
        first_at: adaptive: step of the first assignment.
        solver: adaptive: greedy with a proven gap, or HiGHS.
        scope: adaptive: one problem a layer, or one over all layers.
        group_size: adaptive: rows that share a width.
        overlap: what hides the sending: all local edges, or the rows without remote neighbours.
        backward: send output gradients along the forward lists (symmetric graphs), or input
            gradients back.
    """

    name: PolicyName = "adaptive"
    width: int = 4
    bits: tuple[int, ...] = (2, 4, 8)
    lam: float = 0.5
    every: int = 50
    first_at: int = 5
    solver: Literal["greedy", "milp"] = "greedy"
    scope: Literal["layer", "global"] = "layer"
    group_size: int = 100
    overlap: Literal["edges", "nodes"] = "edges"
    backward: Literal["auto", "push", "pull"] = "auto"

    def build(self) -> "tuple[Policy, dict[str, Any]]":
        """The policy, and the settings of `dg.messages` that go with it.

        Raises:
            ConfigError: a setting of the policy is outside its range.
        """
        from adaqp.policy import Adaptive, Drop, Exact, Fixed, Stale

        overlap = None if self.name == "exact-no-overlap" else self.overlap
        settings: dict[str, Any] = {"overlap": overlap, "backward": self.backward}
        if self.name == "adaptive":
            return Adaptive(
                bits=self.bits,
                lam=self.lam,
                every=self.every,
                first_at=self.first_at,
                solver=self.solver,
                scope=self.scope,
                group_size=self.group_size,
            ), settings
        if self.name == "fixed":
            return Fixed(self.width), settings
        return {"stale": Stale, "drop": Drop}.get(self.name, Exact)(), settings

    @property
    def label(self) -> str:
        """Short name for tables and pictures."""
        name = f"fixed {self.width} bits" if self.name == "fixed" else self.name.replace("-", " ")
        return f"{name}, by nodes" if self.overlap == "nodes" else name


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """A training run on a partitioned graph.

    Args:
        model: the layers.
        policy: how messages travel.
        epochs: full-batch steps.
        eval_every: epochs between exact evaluations; 0: only at the end.
        lr: Adam's learning rate.
        seed: of weights, dropout and rounding.
    """

    model: ModelConfig = field(default_factory=ModelConfig)
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    epochs: int = 100
    eval_every: int = 10
    lr: float = 1e-2
    seed: int = 0

    def __post_init__(self) -> None:
        if self.epochs < 1 or self.eval_every < 0:
            raise ConfigError(
                f"epochs must be 1 or more and eval_every 0 or more, got {self.epochs} and "
                f"{self.eval_every}"
            )
        if not self.lr > 0:
            raise ConfigError(f"lr must be above 0, got {self.lr}")
