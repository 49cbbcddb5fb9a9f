"""A plan: which host computes which relations, with the prediction that chose it. JSON both ways."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from heta.graph.schema import Relation, Schema
from shared.errors import DataError
from shared.registry import Registry

if TYPE_CHECKING:
    from heta.graph.hetero_graph import HeteroGraph

__all__ = ["ASSIGNMENTS", "STRATEGIES", "PartPlan", "Plan", "StrategyForecast"]

_FORMAT = 1
_ESTIMATES = "heta.partitioning.strategies"

# Functions that predict a strategy, and in a tie the one that is taken first.
STRATEGIES: Registry[str, Callable[..., Any]] = Registry("strategy")
STRATEGIES.add(
    "raf",
    f"{_ESTIMATES}:estimate_raf",
    "each host aggregates its own relations, and partial rows of the seeds are merged",
)
STRATEGIES.add(
    "replicate",
    f"{_ESTIMATES}:estimate_replicate",
    "each host holds all and computes its share of the seeds",
)
STRATEGIES.add(
    "edge-cut",
    f"{_ESTIMATES}:estimate_edge_cut",
    "hosts own nodes and fetch the rows of others",
)
# Functions that assign roots to parts.
ASSIGNMENTS: Registry[str, Callable[..., Any]] = Registry("assign")
ASSIGNMENTS.add(
    "time", f"{_ESTIMATES}:assign_by_time", "relations go where the predicted step is shortest"
)
ASSIGNMENTS.add(
    "lpt", f"{_ESTIMATES}:assign_by_size", "the largest relation goes to the least loaded part"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PartPlan:
    """The work of one part.

    Attributes:
        roots: relations into the target that this part computes, in the schema's order.
        shares: (index, count) of each root that is cut; the part computes it for the seeds whose
            id modulo `count` is `index`.
        relations: the closure of the roots, one set for each layer, the last layer first.
        feature_types: types whose features the part reads from its folder.
        owned_rows: learnable types whose rows and optimizer state this part keeps.
        fetched_rows: learnable types whose touched rows come from another part in each step.
        held_bytes: memory of edges, features, learnable rows and their optimizer state.
        compute_s: predicted seconds of a step without the network.
        sent_bytes: predicted bytes that this part sends in a step.
    """

    roots: tuple[Relation, ...]
    shares: dict[Relation, tuple[int, int]]
    relations: tuple[frozenset[Relation], ...]
    feature_types: tuple[str, ...]
    owned_rows: tuple[str, ...]
    fetched_rows: tuple[str, ...]
    held_bytes: int
    compute_s: float
    sent_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyForecast:
    """The prediction for one strategy.

    Attributes:
        strategy: "raf", "edge-cut" or "replicate".
        step_s: seconds of a step.
        compute_s: seconds of the slowest part's step without the network.
        sent_bytes: bytes that all ranks send in a step.
        held_bytes: memory of the part that holds most.
        reason: why the strategy is impossible; None if it is possible.
    """

    strategy: str
    step_s: float
    compute_s: float
    sent_bytes: float
    held_bytes: int
    reason: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Which part computes which relations, and what a step is predicted to take.

    Attributes:
        schema: types, relations and counts that the plan was made for.
        strategy: "raf", "edge-cut" or "replicate".
        layers: layers of the model.
        num_parts: number of hosts.
        fanouts: edges drawn a relation and destination, the layer next to the seeds first.
        batch_size: seeds of a step over all hosts.
        hidden: width of hidden and learnable rows.
        uses_dst: whether modules read their destination's row.
        head_dim: outputs of a linear head, which "raf" merges in place of wider rows; None for rows.
        assign: "time" or "lpt", the rule that assigned the roots.
        parts: the work of each part; with "edge-cut" and "replicate" every part has all roots.
        row_owner: part that owns each learnable type ("raf" only).
        step_s: predicted seconds of a step.
        sent_bytes: predicted bytes that all ranks send in a step.
        alternatives: the three strategies' predictions.
        alpha_s: seconds that a message between two hosts takes at least.
        beta_s_per_byte: seconds that each byte between two hosts adds.
        memory_bytes: memory of each host; None for unknown.
        seed: seed of METIS's random choices ("edge-cut" only).
    """

    schema: Schema
    strategy: str
    layers: int
    num_parts: int
    fanouts: tuple[int, ...]
    batch_size: int
    hidden: int
    uses_dst: bool
    assign: str
    parts: tuple[PartPlan, ...]
    row_owner: dict[str, int]
    step_s: float
    sent_bytes: float
    alternatives: tuple[StrategyForecast, ...]
    alpha_s: float
    beta_s_per_byte: float
    memory_bytes: int | None = None
    seed: int = 0
    head_dim: int | None = None

    def to_json(self) -> str:
        """Writes the plan as JSON text, from which `from_json` makes an equal plan."""
        tree: dict[str, Any] = {each.name: getattr(self, each.name) for each in fields(self)}
        tree["schema"] = self.schema.to_json()
        tree["parts"] = [_write_part(part) for part in self.parts]
        tree["alternatives"] = [asdict(alternative) for alternative in self.alternatives]
        return json.dumps({"format": _FORMAT, **tree}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Reads a plan that `to_json` wrote.

        Raises:
            DataError: the text is not a plan, or of another format.
        """
        try:
            tree = _read_tree(text)
            tree["schema"] = Schema.from_json(tree["schema"])
            tree["parts"] = tuple(_read_part(part) for part in tree["parts"])
            tree["alternatives"] = tuple(StrategyForecast(**each) for each in tree["alternatives"])
            tree["fanouts"] = tuple(tree["fanouts"])
            return cls(**tree)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError(
                f"expected a plan of format {_FORMAT} as JSON, as Plan.to_json writes it, got "
                f"{text[:60]!r} ({type(error).__name__}: {error}); make the plan again"
            ) from error

    def fingerprint(self) -> str:
        """Returns 16 hexadecimal digits that differ between different plans."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:16]

    def explain(self) -> str:
        """Describes the parts and compares the three strategies, as text."""
        from heta.partitioning.explanation import explain

        return explain(self)

    def write(self, graph: HeteroGraph, folder: str | Path) -> None:
        """Writes a folder for each part below `folder`.

        Args:
            graph: the graph that the plan was made for.
            folder: where the parts' folders are made.

        Raises:
            DataError: the graph is not the one of the plan, or files stand in the way.
        """
        from heta.graph.part_files import write_parts
        from heta.partitioning.edge_cut import assign_owners

        owners = None
        if self.strategy == "edge-cut":
            owners = assign_owners(graph, self.num_parts, self.seed)
        write_parts(self, graph, folder, owners=owners)


def _write_part(part: PartPlan) -> dict[str, Any]:
    tree: dict[str, Any] = {each.name: getattr(part, each.name) for each in fields(part)}
    tree["shares"] = [[relation, share] for relation, share in part.shares.items()]
    tree["relations"] = [sorted(hop) for hop in part.relations]
    return tree


def _read_tree(text: str) -> dict[str, Any]:
    """A plan's fields, of this format alone."""
    tree = json.loads(text)
    number = tree.pop("format")
    if number != _FORMAT:
        raise ValueError(f"format {number!r}")
    return tree


def _read_part(tree: dict[str, Any]) -> PartPlan:
    shares = {tuple(relation): tuple(share) for relation, share in tree["shares"]}
    tree |= {"shares": shares, "roots": tuple(map(tuple, tree["roots"]))}
    tree["relations"] = tuple(frozenset(map(tuple, hop)) for hop in tree["relations"])
    for name in ("feature_types", "owned_rows", "fetched_rows"):
        tree[name] = tuple(tree[name])
    return PartPlan(**tree)
