"""A plan: the precision of each operator on each rank, with the prediction that chose it; as JSON."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qsync.planner.explanation import explain
from qsync.precisions import HIGHEST, check_precision
from shared.errors import ConfigError, DataError
from shared.files import read_json, write_atomically

if TYPE_CHECKING:
    from torch import nn

__all__ = ["DeniedRaise", "Plan", "RankPlan", "describe_operators"]

_FORMAT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class DeniedRaise:
    """A raise of one operator's precision for which the step had no time left.

    Attributes:
        name: operator.
        precision: what it would compute in.
        noise_removed: squared relative gradient error that this would remove.
        added_s: seconds by which the step would exceed its limit.
    """

    name: str
    precision: str
    noise_removed: float
    added_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlan:
    """The precisions of one rank.

    Attributes:
        device: what the rank computes on, in words.
        lowered: precision of each operator that does not stay in float32.
        noise: predicted squared relative error of this rank's gradient; None if not measured.
        compute_s, float32_s: predicted seconds of its own work in a step, by the plan and in float32.
        idle_s: predicted seconds of a step in which it computes nothing.
        num_casts: casts of a step.
        denied: raises that would help most, given more time.
    """

    device: str = ""
    lowered: Mapping[str, str]
    noise: float | None = None
    compute_s: float | None = None
    float32_s: float | None = None
    idle_s: float | None = None
    num_casts: int | None = None
    denied: tuple[DeniedRaise, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The precision of each operator on each rank.

    Attributes:
        operators: kind and weight shape of each of the model's operators, in the model's order.
        ranks: one entry a rank, or one for all ranks.
        step_s, float32_s: predicted seconds of a step of all ranks, by the plan and in float32; None
            if not measured.
        target_s: longest step that was asked for; None if the fastest was.
        notes: what a reader must know of how the figures were obtained.

    Raises:
        ConfigError: there is no rank, an operator is unknown, or a precision is.
    """

    operators: Mapping[str, str]
    ranks: tuple[RankPlan, ...]
    step_s: float | None = None
    float32_s: float | None = None
    target_s: float | None = None
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.ranks:
            raise ConfigError("Plan.ranks: expected one entry or more, got none; plan for a rank")
        for rank in self.ranks:
            for name, precision in rank.lowered.items():
                _check_operator(name, self.operators)
                check_precision(precision)

    @classmethod
    def uniform(
        cls, model: nn.Module, precision: str, overrides: Mapping[str, str] | None = None
    ) -> Plan:
        """Makes a plan of one precision for all operators and ranks, without measuring.

        Args:
            model: model; it is only read.
            precision: of all operators that `overrides` does not name.
            overrides: precision by operator.

        Raises:
            ConfigError: the model has no operators, or a name or precision is unknown.
        """
        operators = describe_operators(model)
        for name in overrides or {}:
            _check_operator(name, operators)
        precisions = dict.fromkeys(operators, precision) | dict(overrides or {})
        for each in (precision, *precisions.values()):
            check_precision(each)
        lowered = {name: each for name, each in precisions.items() if each != HIGHEST}
        return cls(operators=operators, ranks=(RankPlan(lowered=lowered),))

    @property
    def noise(self) -> float | None:
        """Predicted squared relative error of this rank's gradient; None if not measured."""
        return self.rank(_current_rank()).noise

    @property
    def is_target_met(self) -> bool:
        """Whether the predicted step is within the target, if there is one."""
        return self.target_s is None or (self.step_s is not None and self.step_s <= self.target_s)

    def rank(self, rank: int) -> RankPlan:
        """Returns the entry of a rank.

        Raises:
            ConfigError: the plan was made for fewer ranks.
        """
        if len(self.ranks) == 1:
            return self.ranks[0]
        if not 0 <= rank < len(self.ranks):
            raise ConfigError(
                f"rank: expected 0 to {len(self.ranks) - 1}, got {rank}: the plan was made for "
                f"{len(self.ranks)} ranks; plan anew for these"
            )
        return self.ranks[rank]

    def precision(self, name: str, rank: int = 0) -> str:
        """Returns the precision of an operator on a rank.

        Raises:
            ConfigError: the operator or the rank is unknown.
        """
        _check_operator(name, self.operators)
        return self.rank(rank).lowered.get(name, HIGHEST)

    def check_model(self, model: nn.Module) -> None:
        """Refuses a model that has other operators than the plan's.

        Raises:
            ConfigError: an operator is missing, is new, or has another kind or shape.
        """
        operators = describe_operators(model)
        for name in [*self.operators, *operators]:
            expected, got = self.operators.get(name, "none"), operators.get(name, "none")
            if expected != got:
                raise ConfigError(
                    f"plan: expected the model that it was made for, with {name!r} as {expected}, "
                    f"got {got}; plan anew for this model"
                )

    def explain(self) -> str:
        """Describes the plan: operators lowered, step, gradient error, casts, what would help."""
        return explain(self)

    def fingerprint(self) -> str:
        """Returns 16 hexadecimal digits that differ between different plans."""
        text = json.dumps(asdict(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def save(self, path: str | Path) -> None:
        """Writes the plan as JSON, replacing `path` at once."""
        tree = {"format": _FORMAT, "fingerprint": self.fingerprint(), **asdict(self)}
        write_atomically(path, json.dumps(tree, indent=1) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Reads a plan that `save` wrote.

        Raises:
            DataError: the file is missing, is not a plan of this format, or was edited.
        """
        tree = read_json(path, "a plan")
        try:
            plan = _build_plan(tree)
            recorded, fingerprint = tree["fingerprint"], plan.fingerprint()
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError(
                f"{path}: expected a plan of format {_FORMAT} as Plan.save writes it, got "
                f"{type(error).__name__}: {error}; make the plan again"
            ) from error
        if recorded != fingerprint:
            raise DataError(
                f"{path}: expected the fingerprint {fingerprint} of its content, got "
                f"{recorded}: the plan was edited; make it again, or use Plan.uniform with "
                "overrides"
            )
        return plan


def _build_plan(tree: dict[str, Any]) -> Plan:
    if tree["format"] != _FORMAT:
        raise ValueError(f"format {tree['format']!r}")
    kept = {field.name for field in fields(Plan)}
    if unknown := tree.keys() - kept - {"format", "fingerprint"}:
        raise ValueError(f"unknown keys {sorted(unknown)}")
    ranks = []
    for entry in tree["ranks"]:
        denied = tuple(DeniedRaise(**each) for each in entry["denied"])
        ranks.append(RankPlan(**entry | {"denied": denied}))
    entries = {name: tree[name] for name in kept}
    return Plan(**entries | {"ranks": tuple(ranks), "notes": tuple(tree["notes"])})


def describe_operators(model: nn.Module) -> dict[str, str]:
    """Describes the kind and the weight's shape of each operator, as in "Linear 384x1536".

    A model to which a plan was applied has the same description as before.

    Raises:
        ConfigError: the model has no operators.
    """
    from qsync.runtime.modules import list_operators

    operators = {}
    for name, module in list_operators(model).items():
        kind = type(module).__name__.removeprefix("Lowered")
        weight = getattr(module, "weight", None)
        shape = "" if weight is None else f" {'x'.join(map(str, weight.shape))}"
        operators[name] = kind + shape
    if not operators:
        raise ConfigError(
            "model: expected linear layers, convolutions or embeddings, got a "
            f"{type(model).__name__} without any; there is nothing to lower"
        )
    return operators


def _check_operator(name: str, operators: Mapping[str, Any]) -> None:
    if name not in operators:
        near = get_close_matches(name, operators, n=1)
        hint = (
            f"; did you mean {near[0]!r}?"
            if near
            else "; name a linear layer, convolution or embedding"
        )
        raise ConfigError(
            f"operator: expected one of the plan's {len(operators)}, got {name!r}{hint}"
        )


def _current_rank() -> int:
    """The rank of this process, 0 where none was joined."""
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return 0
    return distributed.get_rank()
