"""Neighbours of nodes as they were at a time: the sampling step of temporal graph networks.

Every root is answered exactly and by itself: edges strictly earlier than its bound, whatever was
asked before or beside it. Draws are a pure function of the stream's key, the root's node and time
and the number of the draw, so that cuts into batches, threads, ranks and devices change nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Int64, Shaped
from torch import Tensor

from shared.errors import ConfigError, DataError
from shared.kernels.registry import select
from shared.kernels.temporal.adjacency import Adjacency

__all__ = ["MAX_FANOUT", "Adjacency", "Policy", "TemporalBlock", "count_before", "sample"]

Policy = Literal["recent", "uniform"]

# Draws of a root have 16 bits of the counter.
MAX_FANOUT = 1 << 16


@dataclass(frozen=True, slots=True, eq=False)
class TemporalBlock:
    """Roots and what was sampled for them: one entry a neighbour, in the order of the roots.

    Attributes:
        roots: int64 [num_roots].
        root_times: int64 or float64 [num_roots].
        nodes: int64 [num_sampled], neighbours; a root's newest first where the newest were asked for.
        times: [num_sampled], of the edges.
        dt: [num_sampled], root time minus edge time.
        eids: int64 [num_sampled].
        row: int64 [num_sampled], which root, never falling.
    """

    roots: Int64[Tensor, " num_roots"]
    root_times: Shaped[Tensor, " num_roots"]
    nodes: Int64[Tensor, " num_sampled"]
    times: Shaped[Tensor, " num_sampled"]
    dt: Shaped[Tensor, " num_sampled"]
    eids: Int64[Tensor, " num_sampled"]
    row: Int64[Tensor, " num_sampled"]


def count_before(adjacency: Adjacency, bounds: Shaped[Tensor, " nodes"]) -> Int64[Tensor, " nodes"]:
    """How many edges of each node are earlier than the node's bound.

    Args:
        adjacency: the edges.
        bounds: a time for each node, of the adjacency's type and on its device.

    Raises:
        DataError: length or type does not fit.
    """
    if bounds.shape != (adjacency.num_nodes,) or bounds.dtype != adjacency.times.dtype:
        raise DataError(
            f"expected a bound of {adjacency.times.dtype} for each of {adjacency.num_nodes} nodes, "
            f"got {bounds.dtype} {list(bounds.shape)}"
        )
    return select("temporal", bounds.device).count_before(adjacency, bounds.contiguous())


def sample(
    adjacency: Adjacency,
    roots: Int64[Tensor, " num_roots"],
    root_times: Shaped[Tensor, " num_roots"],
    fanout: int,
    *,
    policy: Policy = "recent",
    replace: bool = True,
    before: Shaped[Tensor, " num_roots"] | None = None,
    since: Shaped[Tensor, " num_roots"] | None = None,
    key: int = 0,
) -> TemporalBlock:
    """Up to `fanout` neighbours of each root over edges with since <= time < before.

    "recent" takes the newest, newest first. "uniform" draws `fanout` independent ones, or with
    `replace=False` different edges, all of them where there are no more than `fanout`.

    Args:
        adjacency: the edges, on the roots' device.
        roots: nodes; a node beyond the table, or of negative id, has no neighbours.
        root_times: of the adjacency's type of time.
        fanout: at least 0, at most MAX_FANOUT.
        policy: which neighbours.
        replace: whether one edge may be drawn several times; for "uniform".
        before: end of the time looked at, exclusive; `root_times` when None.
        since: its beginning, inclusive; none when None.
        key: stream of the draws, from `shared.kernels.philox.stream_key`.

    Raises:
        ConfigError: fanout or policy is none of these.
        DataError: lengths, types or devices do not fit.
    """
    if policy not in ("recent", "uniform"):
        raise ConfigError(f"expected policy 'recent' or 'uniform', got {policy!r}")
    if not 0 <= fanout <= MAX_FANOUT:
        raise ConfigError(f"expected a fanout in [0, {MAX_FANOUT}], got {fanout}")
    before = root_times if before is None else before
    for name, tensor in (("root_times", root_times), ("before", before), ("since", since)):
        if tensor is None:
            continue
        if tensor.dtype != adjacency.times.dtype or tensor.shape != roots.shape:
            raise DataError(
                f"expected {name} {adjacency.times.dtype} {list(roots.shape)}, got {tensor.dtype} "
                f"{list(tensor.shape)}"
            )
    if roots.dtype != torch.int64 or roots.device != adjacency.table.device:
        raise DataError(
            f"expected int64 roots on {adjacency.table.device}, got {roots.dtype} on {roots.device}"
        )
    form = select("temporal", roots.device)
    run = form.recent if policy == "recent" else form.uniform
    options = () if policy == "recent" else (replace, key)
    found = run(
        adjacency,
        roots.contiguous(),
        root_times.contiguous(),
        before.contiguous(),
        None if since is None else since.contiguous(),
        fanout,
        *options,
    )
    return TemporalBlock(roots, root_times, *found)
