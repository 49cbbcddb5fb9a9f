"""What is known of a graph without its edges: types, relations, counts and widths.

Planning needs nothing else, so that a graph can be planned that no machine here could hold. Relations
are (source type, name, destination type); two of them may join the same types, and one may join a type
to itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shared.errors import ConfigError, DataError

__all__ = ["Relation", "Schema", "list_active_relations", "name_relation"]

Relation = tuple[str, str, str]


def name_relation(relation: Relation) -> str:
    """Writes a relation for people: `src -name-> dst`."""
    src, name, dst = relation
    return f"{src} -{name}-> {dst}"


@dataclass(frozen=True, slots=True)
class Schema:
    """Types and relations of a graph with their sizes.

    Attributes:
        num_nodes: nodes of each type.
        num_edges: edges of each relation; its order numbers the relations.
        feat_dim: width of each type's features; a type that is absent or 0 has none.
        target: type whose nodes are classified.

    Raises:
        DataError: the target is absent or has no relation into it, a relation names an unknown type,
            a count is negative or no whole number, or a relation has edges at a type without nodes.
    """

    num_nodes: dict[str, int]
    num_edges: dict[Relation, int]
    feat_dim: dict[str, int]
    target: str

    def __post_init__(self) -> None:
        for field in ("num_nodes", "num_edges", "feat_dim"):
            counts = getattr(self, field)
            if not isinstance(counts, Mapping):
                raise DataError(f"{field}: expected a dictionary, got {type(counts).__name__}")
        for name in self.num_nodes:
            if not isinstance(name, str):
                raise DataError(f"num_nodes: expected texts as types, got {name!r}; name it")
        for field in ("num_nodes", "num_edges", "feat_dim"):
            object.__setattr__(self, field, _read_counts(field, getattr(self, field)))
        self._check_relations()
        self._check_feat_dim()
        self._check_target()

    def _check_relations(self) -> None:
        for relation, count in self.num_edges.items():
            if not (
                isinstance(relation, tuple)
                and len(relation) == 3
                and all(isinstance(part, str) for part in relation)
            ):
                raise DataError(
                    "relations: expected (source type, name, destination type) of texts, got "
                    f"{relation!r}"
                )
            for node_type in (relation[0], relation[2]):
                if node_type not in self.num_nodes:
                    raise DataError(
                        f"relation {name_relation(relation)}: expected one of the types "
                        f"{list(self.num_nodes)}, got {node_type!r}; add it to num_nodes"
                    )
                if count and not self.num_nodes[node_type]:
                    raise DataError(
                        f"relation {name_relation(relation)}: expected no edges, as type {node_type!r} "
                        f"has no nodes, got {count}"
                    )

    def _check_feat_dim(self) -> None:
        for node_type in self.feat_dim:
            if node_type not in self.num_nodes:
                raise DataError(
                    f"feat of type {node_type!r}: expected one of the types {list(self.num_nodes)}"
                )
        for relation in self.num_edges:
            for node_type in (relation[0], relation[2]):
                if not self.num_nodes[node_type] and not self.feat_dim.get(node_type):
                    raise DataError(
                        f"type {node_type!r} of relation {name_relation(relation)}: expected nodes, or "
                        "features that say how wide its rows are, got 0 nodes and no features; drop "
                        f"the type and its relations, or give it features of shape [0, dim]"
                    )

    def _check_target(self) -> None:
        types = list(self.num_nodes)
        if self.target not in self.num_nodes:
            raise DataError(f"target: expected one of the types {types}, got {self.target!r}")
        if not self.roots:
            into = list(dict.fromkeys(relation[2] for relation in self.num_edges))
            raise DataError(
                f"target {self.target!r}: expected a relation into it, got relations into {into} of the "
                f"types {types}; add reversed relations, or choose another target"
            )

    @property
    def types(self) -> tuple[str, ...]:
        """All types of nodes, in the order of `num_nodes`."""
        return tuple(self.num_nodes)

    @property
    def relations(self) -> tuple[Relation, ...]:
        """All relations, in the order of `num_edges`."""
        return tuple(self.num_edges)

    @property
    def roots(self) -> tuple[Relation, ...]:
        """The relations into the target."""
        return self.into(self.target)

    @property
    def learnable(self) -> tuple[str, ...]:
        """The types that have nodes and no features, whose rows are learned."""
        return tuple(
            node_type
            for node_type, count in self.num_nodes.items()
            if count and not self.feat_dim.get(node_type)
        )

    def into(self, node_type: str) -> tuple[Relation, ...]:
        """Selects the relations whose destinations are of one type."""
        return tuple(relation for relation in self.num_edges if relation[2] == node_type)

    def to_json(self) -> dict[str, Any]:
        """Converts to what `json` writes; names may have any characters."""
        return {
            "num_nodes": dict(self.num_nodes),
            "num_edges": [[*relation, count] for relation, count in self.num_edges.items()],
            "feat_dim": dict(self.feat_dim),
            "target": self.target,
        }

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Schema:
        """Reads what `to_json` made.

        Raises:
            DataError: an entry is missing, of another form or given twice, or the schema is invalid.
        """
        try:
            rows = [(tuple(row[:3]), row[3]) for row in fields["num_edges"]]
            counts = dict(rows)
            nodes, dims, target = (fields[key] for key in ("num_nodes", "feat_dim", "target"))
        except (KeyError, IndexError, TypeError) as error:
            raise DataError(
                f"schema: expected num_nodes, num_edges, feat_dim and target, got {error!r}"
            ) from error
        if len(counts) < len(rows):
            relations = [relation for relation, _ in rows]
            twice = next(relation for relation in relations if relations.count(relation) > 1)
            raise DataError(f"schema: expected each relation once, got {twice!r} twice")
        return cls(nodes, counts, dims, target)


def list_active_relations(
    schema: Schema, layers: int, uses_dst: bool
) -> tuple[frozenset[Relation], ...]:
    """Lists the relations of each layer, from 1 up: those whose source has rows below the layer.

    A type without in-relations has input rows and no others, so that from layer 2 on nothing comes
    from it. Where modules read the destination's row, that must exist too. PyG's and DGL's
    heterogeneous convolutions leave out the same relations.

    Raises:
        ConfigError: there is no layer.
        DataError: no relation reaches the target in the last layer.
    """
    if layers < 1:
        raise ConfigError(f"layers: expected 1 or more, got {layers}")
    with_rows = set(schema.types)
    active = []
    for _ in range(layers):
        active.append(
            frozenset(
                relation
                for relation in schema.relations
                if relation[0] in with_rows and (not uses_dst or relation[2] in with_rows)
            )
        )
        with_rows = {relation[2] for relation in active[-1]}
    if not any(relation[2] == schema.target for relation in active[-1]):
        raise DataError(
            f"layers: expected a path of {layers} relations that ends in {schema.target!r}, there is "
            f"none; use fewer layers, or add reversed relations"
        )
    return tuple(active)


def _read_counts(field: str, counts: Mapping[Any, Any]) -> dict[Any, int]:
    checked = {}
    for key, count in counts.items():
        is_whole = hasattr(count, "__index__") and not isinstance(count, bool)
        if not is_whole or int(count) < 0:
            raise DataError(f"{field} of {key!r}: expected a whole number from 0, got {count!r}")
        checked[key] = int(count)
    return checked
