"""Conversion from and to PyG's `HeteroData`.

Whatever training does not read is refused by name, so that no weight, time or column is lost unseen.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from heta.graph.checks import MASKS, check_unused, choose_target
from heta.graph.hetero_graph import HeteroGraph
from heta.graph.schema import Relation, name_relation
from shared.errors import DataError

if TYPE_CHECKING:
    from torch_geometric.data import HeteroData

__all__ = ["from_pyg", "to_pyg"]


def from_pyg(
    data: Any, target: str | None = None, label: str = "y", ignore: Collection[str] = ()
) -> HeteroGraph:
    """Converts a `HeteroData`: `x` of each type, and labels and masks of the target.

    `train_mask`, `val_mask` and `test_mask` become the masks "train", "val" and "test". A type without
    `x` gets learnable rows. Edges are read from `edge_index`, or from `adj_t` whose values are all 1.

    Args:
        data: the graph.
        target: type whose nodes are classified; None: the only type with labels.
        label: attribute of the target that has the labels.
        ignore: names of attributes of nodes and edges to leave out.

    Raises:
        DataError: PyG is missing, `data` is no HeteroData, a number of nodes is unknown, an attribute
            is neither read nor ignored, or the graph is invalid.
    """
    _check_type(data)
    kinds = list(data.node_types)
    for relation in data.edge_types:
        for kind in (relation[0], relation[2]):
            if kind not in kinds:
                raise DataError(
                    f"type {kind!r} of relation {name_relation(relation)}: expected its number of nodes; "
                    f"set data[{kind!r}].num_nodes"
                )
    labelled = [kind for kind in kinds if label in data[kind]]
    target = choose_target("data", kinds, target, labelled, label)
    num_nodes, feat = {}, {}
    for kind in kinds:
        store = data[kind]
        if not store.can_infer_num_nodes:
            raise DataError(
                f"data[{kind!r}]: expected num_nodes or x, got {sorted(store.keys())}; set "
                f"data[{kind!r}].num_nodes"
            )
        num_nodes[kind] = store.num_nodes
        if "x" in store and "x" not in ignore:
            feat[kind] = store.x
        read = {"x", "num_nodes", label, *MASKS}
        check_unused(f"data[{kind!r}]", set(store.keys()) - read, ignore)
    store = data[target]
    return HeteroGraph(
        num_nodes,
        {relation: _read_edges(data, relation, ignore) for relation in data.edge_types},
        feat,
        target=target,
        label=store.get(label),
        masks={split: store[mask] for mask, split in MASKS.items() if mask in store},
    )


def to_pyg(graph: HeteroGraph) -> HeteroData:
    """Converts to a `HeteroData` that shares the graph's tensors.

    Raises:
        DataError: PyG is missing.
    """
    hetero_data = _import_pyg().HeteroData()
    for kind, count in graph.num_nodes.items():
        hetero_data[kind].num_nodes = count
        if kind in graph.feat:
            hetero_data[kind].x = graph.feat[kind]
    if graph.label is not None:
        hetero_data[graph.target].y = graph.label
    names = {split: mask for mask, split in MASKS.items()}
    for split, mask in graph.masks.items():
        hetero_data[graph.target][names.get(split, f"{split}_mask")] = mask
    for relation, ends in graph.edges.items():
        hetero_data[relation].edge_index = torch.stack(ends)
    return hetero_data


def _import_pyg() -> Any:
    try:
        import torch_geometric.data
    except ImportError as error:
        raise DataError(
            f"PyG: expected torch_geometric ({error}); run: pip install 'meshyard-heta[pyg]'"
        ) from error
    return torch_geometric.data


def _check_type(data: Any) -> None:
    pyg = _import_pyg()
    if isinstance(data, pyg.Data):
        raise DataError(
            f"data: expected a HeteroData, got a {type(data).__name__}, which has nodes of one type and one "
            "relation; make a HeteroData with a type for each kind of node, "
            "data.to_heterogeneous(node_type, edge_type) if its kinds are numbered"
        )
    if not isinstance(data, pyg.HeteroData):
        raise DataError(f"data: expected a HeteroData, got {type(data).__name__}")


def _read_edges(data: Any, relation: Relation, ignore: Collection[str]) -> tuple[Tensor, Tensor]:
    store, label = data[relation], f"data[{relation!r}]"
    forms = [name for name in ("edge_index", "adj_t") if name in store]
    if len(forms) != 1:
        raise DataError(f"{label}: expected edge_index or adj_t, got {sorted(store.keys())}")
    check_unused(label, set(store.keys()) - set(forms), ignore)
    if forms == ["adj_t"]:
        from torch_geometric.utils import to_edge_index

        # Rows are destinations.
        (dst, src), values = to_edge_index(store.adj_t)
        if not bool((values == 1).all()) and "adj_t" not in ignore:
            raise DataError(
                f"{label}.adj_t: expected values of 1, as edge weights are not read, got "
                f"{values[values != 1][0].item()}; ignore=('adj_t',) leaves its values out"
            )
        return src, dst
    edge_index = store.edge_index
    # The rows of PyG's own EdgeIndex are of a type of their own.
    if hasattr(edge_index, "as_tensor"):
        edge_index = edge_index.as_tensor()
    if getattr(edge_index, "ndim", 0) != 2 or len(edge_index) != 2:
        raise DataError(
            f"{label}.edge_index: expected [2, num_edges], got "
            f"{list(getattr(edge_index, 'shape', [])) or type(edge_index).__name__}; edge_index.t() turns "
            "rows of pairs around"
        )
    return edge_index[0], edge_index[1]
