"""Conversion from DGL's graphs of several types.

Whatever training does not read is refused by name, so that no weight, time or column is lost unseen.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from heta.graph.checks import MASKS, check_unused, choose_target
from heta.graph.hetero_graph import HeteroGraph
from shared.errors import DataError

__all__ = ["from_dgl"]


def from_dgl(
    g: Any,
    target: str | None = None,
    feat: str = "feat",
    label: str = "label",
    ignore: Collection[str] = (),
) -> HeteroGraph:
    """Converts a graph: features of each type, and labels and masks of the target.

    `train_mask`, `val_mask` and `test_mask` become the masks "train", "val" and "test". A type without
    features gets learnable rows. The ids that DGL keeps in subgraphs (`dgl.NID`, `dgl.EID`) are left
    out.

    Args:
        g: the graph, with several types of nodes or relations.
        target: type whose nodes are classified; None: the only type with labels.
        feat: node data that has the features.
        label: node data of the target that has the labels.
        ignore: names of node and edge data to leave out.

    Raises:
        DataError: DGL is missing, `g` is no graph of several types, node or edge data is neither read
            nor ignored, or the graph is invalid.
    """
    dgl = _import_dgl()
    if not isinstance(g, dgl.DGLGraph) or g.is_block:
        raise DataError(
            f"g: expected a DGLGraph, got {'a block' if hasattr(g, 'is_block') else type(g).__name__}"
        )
    if g.is_homogeneous:
        raise DataError(
            "g: expected a graph with several types of nodes or relations, got one of each; make it by "
            "dgl.heterograph, or by dgl.to_heterogeneous if its types are numbered"
        )
    labelled = [kind for kind in g.ntypes if label in g.nodes[kind].data]
    target = choose_target("g", g.ntypes, target, labelled, label)
    for kind in g.ntypes:
        read = {feat, label, *MASKS, dgl.NID}
        check_unused(f"g.nodes[{kind!r}].data", set(g.nodes[kind].data) - read, ignore)
    for relation in g.canonical_etypes:
        check_unused(f"g.edges[{relation!r}].data", set(g.edges[relation].data) - {dgl.EID}, ignore)
    columns = g.nodes[target].data
    return HeteroGraph(
        {kind: g.num_nodes(kind) for kind in g.ntypes},
        {relation: g.edges(etype=relation) for relation in g.canonical_etypes},
        {
            kind: g.nodes[kind].data[feat]
            for kind in g.ntypes
            if feat in g.nodes[kind].data and feat not in ignore
        },
        target=target,
        label=columns.get(label),
        masks={split: columns[mask] for mask, split in MASKS.items() if mask in columns},
    )


def _import_dgl() -> Any:
    try:
        import dgl
    except ImportError as error:
        raise DataError(
            f"DGL: expected dgl ({error}); run: pip install 'meshyard-heta[dgl]'"
        ) from error
    return dgl
