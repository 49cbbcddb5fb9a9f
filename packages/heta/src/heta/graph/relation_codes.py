"""How each node takes part in the relations, as a fixed row a node.

BG-HGNN's code of a node is R_i = (sum of e_r over its in-edges - sum of e_r over its out-edges) / degree,
for a random vector e_r of each relation. It equals c_i E: `relation_code` computes c_i, which is as wide
as there are relations, and a model multiplies it by its E.
"""

from __future__ import annotations

import torch
from jaxtyping import Float32
from torch import Tensor

from heta.graph.hetero_graph import HeteroGraph
from shared.kernels.segment import CSR

__all__ = ["relation_code", "sparse_relation_code"]


def relation_code(graph: HeteroGraph) -> dict[str, Float32[Tensor, "nodes num_relations"]]:
    """Computes each relation's in-edges less out-edges, over the node's in- and out-edges.

    An edge of a relation from a type to itself counts at both its ends, so that a loop counts twice in
    the degree and cancels in the code. Nodes without edges have zeros.

    Returns:
        By type, a column for each relation in the order of `graph.schema.relations`.
    """
    return {kind: _densify(sparse_relation_code(graph, kind)) for kind in graph.num_nodes}


def sparse_relation_code(graph: HeteroGraph, node_type: str) -> CSR:
    """Computes the codes of one type's nodes as sparse rows [num_nodes, num_relations].

    A node has an entry for each relation that it takes part in, few of many hundred.
    """
    num_nodes, relations = graph.num_nodes[node_type], graph.schema.relations
    degree = torch.zeros(num_nodes, dtype=torch.int64)
    rows, columns, values = [], [], []
    for column, relation in enumerate(relations):
        signed = torch.zeros(num_nodes, dtype=torch.int64)
        for sign, kind, ids in zip(
            (-1, 1), (relation[0], relation[2]), graph.edges[relation], strict=True
        ):
            if kind == node_type:
                counts = torch.bincount(ids, minlength=num_nodes)
                signed += sign * counts
                degree += counts
        row = signed.nonzero()[:, 0]
        rows.append(row)
        columns.append(torch.full_like(row, column))
        values.append(signed[row])
    row = torch.cat(rows)
    code = (torch.cat(values) / degree[row]).float()
    return CSR.from_coo(row, torch.cat(columns), num_nodes, len(relations), code)


def _densify(code: CSR) -> Tensor:
    dense = torch.zeros(code.num_rows, code.num_cols)
    row = torch.repeat_interleave(torch.arange(code.num_rows), code.indptr.diff())
    assert code.weight is not None
    dense[row, code.indices] = code.weight
    return dense
