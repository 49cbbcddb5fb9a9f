"""A heterogeneous graph in memory: nodes by type, edges by relation, features, labels and masks.

All input is checked where the graph is made, and kept in one form: int64 ids and labels, float32
features, bool masks. Tensors that have this form already are shared with the caller; `check_unchanged`
notices if they were written to.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jaxtyping import Int64
from torch import Tensor

from heta.graph.checks import read_edges, read_features, read_labels, read_mask, select_seeds
from heta.graph.schema import Relation, Schema, name_relation
from shared.errors import DataError
from shared.kernels.segment import CSR

__all__ = ["HeteroGraph"]


@dataclass(frozen=True, eq=False, init=False)
class HeteroGraph:
    """A graph with several types of nodes and relations, to classify the nodes of one type.

    Attributes:
        num_nodes: nodes of each type.
        edges: sources and destinations of each relation's edges, int64 [num_edges] each.
        feat: float32 [num_nodes, dim] of each type that has features.
        target: type whose nodes are classified.
        label: int64 [num_nodes of target], classes from 0, -1 for a missing one; None without labels.
        masks: bool [num_nodes of target] of each split.
        node_ids: texts [num_nodes], the user's own ids, of the types that have them.
        class_names: texts by class, where labels had them.
    """

    num_nodes: dict[str, int] = field(repr=False)
    edges: dict[Relation, tuple[Tensor, Tensor]] = field(repr=False)
    feat: dict[str, Tensor] = field(repr=False)
    target: str = field(repr=False)
    label: Tensor | None = field(repr=False)
    masks: dict[str, Tensor] = field(repr=False)
    node_ids: dict[str, np.ndarray] = field(repr=False)
    class_names: tuple[str, ...] = field(repr=False)
    schema: Schema
    _cache: dict[Any, Any] = field(repr=False)

    def __init__(
        self,
        num_nodes: Mapping[str, int],
        edges: Mapping[Relation, Any],
        feat: Mapping[str, Any] | None = None,
        *,
        target: str,
        label: Any = None,
        masks: Mapping[str, Any] | None = None,
        node_ids: Mapping[str, Any] | None = None,
        class_names: Sequence[str] = (),
    ) -> None:
        """Checks and converts tensors, arrays or lists.

        Args:
            num_nodes: nodes of each type.
            edges: (source ids, destination ids) of each relation, of any type of whole numbers but
                uint64; an edge may repeat. Their order numbers the relations.
            feat: features [num_nodes, dim] by type. Whole numbers and bools become float32 where it
                holds them exactly, other floats are rounded to float32. Types without features get
                learnable rows.
            target: type whose nodes are classified.
            label: classes from 0 [num_nodes of target]; -1, or NaN among floats, is a missing label.
            masks: nodes of each split, bool [num_nodes of target].
            node_ids: the user's own ids as texts [num_nodes] by type.
            class_names: texts by class.

        Raises:
            DataError: types, lengths or values do not fit; the message names the type or relation,
                the row and the value.
        """
        counts = {relation: _count(relation, ends) for relation, ends in edges.items()}
        features = {kind: read_features(kind, rows) for kind, rows in (feat or {}).items()}
        dims = {kind: rows.shape[1] for kind, rows in features.items()}
        schema = Schema(dict(num_nodes), counts, dims, target)
        for kind, rows in features.items():
            if len(rows) != schema.num_nodes[kind]:
                raise DataError(
                    f"feat of {kind!r}: expected a row for each of its {schema.num_nodes[kind]} nodes, "
                    f"got {len(rows)}"
                )
        names = {kind: np.asarray(ids, object) for kind, ids in (node_ids or {}).items()}
        for kind, ids in names.items():
            if len(ids) != schema.num_nodes.get(kind):
                raise DataError(
                    f"node_ids of {kind!r}: expected {schema.num_nodes.get(kind)}, got {len(ids)}"
                )
        num_targets = schema.num_nodes[target]
        values = {
            "num_nodes": schema.num_nodes,
            "edges": {
                relation: read_edges(relation, edges[relation], schema.num_nodes)
                for relation in schema.relations
            },
            "feat": features,
            "target": target,
            "label": None if label is None else read_labels(label, target, num_targets),
            "masks": {
                split: read_mask(split, mask, target, num_targets)
                for split, mask in (masks or {}).items()
            },
            "node_ids": names,
            "class_names": tuple(class_names),
            "schema": schema,
            "_cache": {},
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @property
    def num_classes(self) -> int:
        """The largest label plus 1; 0 without labels."""
        if self.label is None or not len(self.label):
            return 0
        return int(self.label.max()) + 1

    @property
    def num_unlabelled(self) -> int:
        """The number of target nodes whose label is missing."""
        if self.label is None:
            return self.num_nodes[self.target]
        return int((self.label < 0).sum())

    def seeds(self, split: str) -> Int64[Tensor, " seeds"]:
        """Selects the nodes of a split that have a label, in order.

        Raises:
            DataError: there are no labels, or no such split.
        """
        return select_seeds(split, self.label, self.masks)

    def csr(self, relation: Relation) -> CSR:
        """Returns a relation's sources by destination, each row in order of source; made once.

        Raises:
            DataError: the graph has no such relation.
        """
        if relation not in self.edges:
            known = ", ".join(map(name_relation, self.edges))
            raise DataError(f"relation {relation!r}: expected one of {known}")
        if relation not in self._cache:
            src, dst = self.edges[relation]
            num_src, num_dst = self.num_nodes[relation[0]], self.num_nodes[relation[2]]
            self._cache[relation] = CSR.from_coo(dst, src, num_dst, num_src)
        return self._cache[relation]

    def fingerprint(self) -> str:
        """Computes a digest of all that training reads; made once."""
        if "fingerprint" not in self._cache:
            self._cache["fingerprint"] = self._digest()
        return self._cache["fingerprint"]

    def check_unchanged(self) -> None:
        """Checks that no tensor was written to since `fingerprint` was first called.

        Raises:
            DataError: one was.
        """
        before, after = self.fingerprint(), self._digest()
        if before != after:
            raise DataError(
                f"graph: expected fingerprint {before}, got {after}: its tensors were changed after it "
                "was planned or trained on; make a new HeteroGraph, and plan again"
            )

    def _digest(self) -> str:
        digest = hashlib.blake2b(digest_size=16)
        header = [self.schema.to_json(), list(self.feat), self.label is not None, list(self.masks)]
        digest.update(json.dumps(header).encode())
        label = [] if self.label is None else [self.label]
        ends = [ids for pair in self.edges.values() for ids in pair]
        for tensor in (*ends, *self.feat.values(), *label, *self.masks.values()):
            digest.update(tensor.contiguous().numpy().data if tensor.numel() else b"")
        return digest.hexdigest()


def _count(relation: Relation, ends: Any) -> int:
    """The number of a relation's edges; `read_edges` checks them, once their types are known."""
    if isinstance(ends, Tensor | np.ndarray) and ends.ndim != 2:
        raise DataError(
            f"edges of {relation!r}: expected (source ids, destination ids), got shape {list(ends.shape)}"
        )
    if not hasattr(ends, "__len__") or len(ends) != 2:
        raise DataError(
            f"edges of {relation!r}: expected (source ids, destination ids), got "
            f"{f'{len(ends)} entries' if hasattr(ends, '__len__') else repr(ends)}; edge weights and "
            "attributes are not read"
        )
    if not hasattr(ends[0], "__len__"):
        raise DataError(f"edges of {relation!r}: expected lists of ids, got {ends[0]!r}")
    return len(ends[0])
