"""Settings of a training run: the same dataclasses in Python and on the command line.

This module imports neither torch nor numba, so that `adaqp --help` prints at once.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal

from adaqp.planner.solvers import SCOPES, SOLVERS
from adaqp.planner.widths import WIDTHS
from adaqp.policy import Adaptive, Drop, Exact, Fixed, Policy, Stale
from shared.cli import choice
from shared.errors import ConfigError
from shared.registry import Registry

if TYPE_CHECKING:
    from torch import nn

    from adaqp.messages.distgraph import DistGraph

__all__ = ["MODELS", "POLICIES", "ModelConfig", "PolicyConfig", "PolicyKind", "RunConfig"]

# Functions (dg, dims, *, norm, dropout) -> module.
MODELS: Registry[str, Callable[..., Any]] = Registry("model.conv")
MODELS.add("gcn", "adaqp.training.nn:gcn", "Kipf and Welling's graph convolution")
MODELS.add("sage", "adaqp.training.nn:sage", "GraphSAGE with the mean of neighbours")
MODELS.add("gin", "adaqp.training.nn:gin", "graph isomorphism network")
MODELS.add("gat", "adaqp.training.nn:gat", "graph attention, 4 heads")


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

    conv: Annotated[str, choice(MODELS)] = "gcn"
    hidden: int = 128
    layers: int = 3
    norm: Literal["layer", "none"] = "layer"
    dropout: float = 0.5

    def __post_init__(self) -> None:
        MODELS.check(self.conv)
        if self.hidden < 1 or self.layers < 1:
            raise ConfigError(
                f"model.hidden, model.layers: expected 1 or more, got {self.hidden} and {self.layers}"
            )
        if not 0 <= self.dropout < 1:
            raise ConfigError(f"model.dropout: expected a share in [0, 1), got {self.dropout}")

    def build(self, dg: "DistGraph") -> "nn.Module":
        """The model for a rank's share, in its features' dtype and on their device."""
        dims = [dg.feat.shape[1], *[self.hidden] * (self.layers - 1), dg.num_classes]
        norm = None if self.norm == "none" else self.norm
        model = MODELS.get(self.conv)(dg, dims, norm=norm, dropout=self.dropout)
        return model.to(device=dg.feat.device, dtype=dg.feat.dtype)


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyKind:
    """A named policy of the command line and of tables.

    Attributes:
        build: makes the policy from its settings.
        overlaps: whether exchanges overlap with local work.
        has_width: whether the policy uses the setting `width`; tables print it beside the name,
            and `adaqp plan` predicts the policy at several widths.
        is_control: whether comparisons omit the policy unless it is named.
    """

    build: "Callable[[PolicyConfig], Policy]"
    overlaps: bool = True
    has_width: bool = False
    is_control: bool = False


POLICIES: Registry[str, PolicyKind] = Registry("policy")


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyConfig:
    """Policy of messages.

    Args:
        name: "exact" (overlapped with local work), "exact-no-overlap", "fixed" (all rows at
            `width` bits), "adaptive" (each group of rows at one of `bits`), "stale" (the messages
            of the step before), "drop" (no messages), or a policy registered elsewhere.
        width: bits a value under the fixed policy.
        bits: bits a value that the adaptive policy chooses from, ascending.
        lam: adaptive: weight of variance against time, 0 to 1.
        every: adaptive: steps between assignments.
        first_at: adaptive: step of the first assignment.
        solver: adaptive: greedy with a proven gap, or HiGHS.
        scope: adaptive: one problem per layer and direction, or one over all of them.
        group_size: adaptive: rows that share a width.
        overlap: local aggregation done while rows are in transit: over all local edges, or of the
            rows without remote neighbours.
        backward: pull sends output gradients along the forward lists (symmetric graphs only), push
            sends the halo's input gradients back, auto pulls where the graph allows it.
    """

    name: Annotated[str, choice(POLICIES)] = "adaptive"
    width: Annotated[int, choice(WIDTHS)] = 4
    bits: tuple[Annotated[int, choice(WIDTHS)], ...] = (2, 4, 8)
    lam: float = 0.5
    every: int = 50
    first_at: int = 5
    solver: Annotated[str, choice(SOLVERS)] = "greedy"
    scope: Annotated[str, choice(SCOPES)] = "layer"
    group_size: int = 100
    overlap: Literal["edges", "nodes"] = "edges"
    backward: Literal["auto", "push", "pull"] = "auto"

    def __post_init__(self) -> None:
        POLICIES.check(self.name)

    def build(self) -> tuple[Policy, dict[str, Any]]:
        """The policy, and the settings of `dg.messages` that go with it.

        Raises:
            ConfigError: a setting of the policy is outside its range.
        """
        kind = POLICIES.get(self.name)
        overlap = self.overlap if kind.overlaps else None
        return kind.build(self), {"overlap": overlap, "backward": self.backward}

    @property
    def label(self) -> str:
        """Short name for tables and figures."""
        name = self.name.replace("-", " ")
        if POLICIES.get(self.name).has_width:
            name = f"{name} {self.width} bits"
        return f"{name}, by nodes" if self.overlap == "nodes" else name


def _build_adaptive(config: PolicyConfig) -> Adaptive:
    names = ("bits", "lam", "every", "first_at", "solver", "scope", "group_size")
    return Adaptive(**{name: getattr(config, name) for name in names})


for _name, _kind, _about in (
    (
        "exact-no-overlap",
        PolicyKind(build=lambda _: Exact(), overlaps=False),
        "exact messages, without overlap with local work",
    ),
    ("exact", PolicyKind(build=lambda _: Exact()), "exact messages, overlapped with local work"),
    (
        "fixed",
        PolicyKind(build=lambda config: Fixed(config.width), has_width=True),
        "all rows at one width",
    ),
    ("adaptive", PolicyKind(build=_build_adaptive), "widths chosen from the data"),
    ("stale", PolicyKind(build=lambda _: Stale()), "exact messages of the step before"),
    ("drop", PolicyKind(build=lambda _: Drop(), is_control=True), "no messages at all"),
):
    POLICIES.add(_name, _kind, _about)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """A training run on a partitioned graph.

    Args:
        model: layers of the model.
        policy: widths and overlap of messages.
        epochs: epochs to train, one full-batch step each.
        eval_every: epochs between exact evaluations; 0: only at the end.
        lr: Adam's learning rate.
        seed: seed of weights, dropout and rounding.
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
                f"epochs, eval_every: expected 1 or more and 0 or more, got {self.epochs} and "
                f"{self.eval_every}"
            )
        if not self.lr > 0:
            raise ConfigError(f"lr: expected a learning rate above 0, got {self.lr}")

    @classmethod
    def from_json(cls, tree: dict[str, Any]) -> "RunConfig":
        """The configuration whose `dataclasses.asdict` was written as JSON."""
        policy = tree["policy"] | {"bits": tuple(tree["policy"]["bits"])}
        return cls(
            **tree | {"model": ModelConfig(**tree["model"]), "policy": PolicyConfig(**policy)}
        )
