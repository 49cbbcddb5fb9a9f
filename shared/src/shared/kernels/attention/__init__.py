"""Attention of roots over sampled neighbours whose inputs are never laid out in memory.

An edge's input is [row of the neighbour | features of the edge | encoded time]. Since q . (W_k x) =
(q W_k) . x and sum a (W_v x) = W_v (sum a x), a layer can project queries and sums, once a root, and
leave to this operator what is done once an edge. Differentiable in everything but the times.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from shared.errors import DataError
from shared.kernels.attention.edges import Edges
from shared.kernels.registry import select

__all__ = ["Edges", "attend"]


def attend(
    query: Float[Tensor, "num_roots heads inputs"],
    bias: Float[Tensor, "num_roots heads"],
    rows: Float[Tensor, "num_rows dim"],
    edges: Edges,
    frequency: Float[Tensor, " time_dim"],
    phase: Float[Tensor, " time_dim"],
    slope: float = 1.0,
) -> Float[Tensor, "num_roots heads inputs"]:
    """Each root's mean of [rows | edge_rows | cos(dt frequency + phase)] over its edges, weighted.

    Weights of a head are softmax(leaky_relu(query . input + bias, slope)). A root without edges has
    zeros. Types other than float32 take the reference. On the CPU sums have one order whatever the
    number of threads; on a GPU those into `rows` and `edge_rows` have none.

    Args:
        query: inputs = dim + edge_dim + time_dim.
        bias: added to the products.
        rows: what neighbours are rows of.
        edges: who reads whom; on the device of `rows`.
        frequency, phase: of encoded time; empty for none.
        slope: of negative scores; 1 leaves them as they are.

    Raises:
        DataError: a shape does not fit, or, on the CPU, an index is out of range.
    """
    num_inputs = rows.shape[1] + edges.edge_rows.shape[1] + len(frequency)
    if query.shape[2] != num_inputs or len(query) != len(edges.starts) - 1:
        raise DataError(
            f"expected query [{len(edges.starts) - 1}, heads, {num_inputs}], got {list(query.shape)}"
        )
    if rows.device.type == "cpu" and len(edges.neighbors):
        for name, index, end in (
            ("neighbors", edges.neighbors, len(rows)),
            ("edge_index", edges.edge_index, len(edges.edge_rows)),
        ):
            low, high = (int(bound) for bound in index.aminmax())
            if low < 0 or high >= end:
                raise DataError(f"expected {name} in [0, {end}), got {low} to {high}")
    if query.dtype == rows.dtype == torch.float32:
        form = select("attention", rows.device)
    else:
        from shared.kernels.attention import reference as form
    return form.attend(query, bias, rows, edges, frequency, phase, slope)
