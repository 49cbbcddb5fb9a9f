"""Relations that a part needs: its roots, the relations into their sources, and so on.

After the metatree of "Heta: Distributed Training of Heterogeneous Graph Neural Networks" (2025), as
one set of relations for each hop: a hidden row depends on its layer, type and node only, so a tree
would repeat subtrees. Parallel and self relations stay apart, because sets hold whole triples.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from heta.graph.schema import Relation, Schema
from shared.errors import ConfigError

__all__ = ["closure", "read_types"]


def closure(schema: Schema, roots: Collection[Relation], layers: int) -> list[set[Relation]]:
    """Collects the relations that `layers` layers above the roots' sources need.

    Args:
        schema: types and relations of the graph.
        roots: relations of the last layer, usually some of those into the target.
        layers: number of layers of the model.

    Returns:
        One set for each layer, the last layer first: the roots, all relations into their sources,
        all relations into the sources of those, and so on.

    Raises:
        ConfigError: there are fewer than 1 layers, or a root is not a relation of the schema.
    """
    if layers < 1:
        raise ConfigError(f"layers: expected at least 1, got {layers}; set layers=1 or more")
    available = set(schema.relations)
    for root in roots:
        if root not in available:
            raise ConfigError(
                f"roots: expected relations of the schema, got {root!r}; take them from "
                f"schema.relations: {list(schema.relations)}"
            )
    hops = [set(roots)]
    while len(hops) < layers:
        sources = {relation[0] for relation in hops[-1]}
        hops.append({relation for relation in schema.relations if relation[2] in sources})
    return hops


def read_types(
    hops: Sequence[Collection[Relation]], target: str, *, uses_dst: bool
) -> tuple[str, ...]:
    """Lists the types, sorted, whose input rows a part reads.

    Args:
        hops: the closure of the part's roots.
        target: type of the seeds.
        uses_dst: whether modules read their destination's row: the part then reads the seeds' rows
            and those of every source, not only the rows next to the first layer.

    Returns:
        The types.
    """
    read_hops = hops if uses_dst else hops[-1:]
    types = {relation[0] for hop in read_hops for relation in hop}
    return tuple(sorted(types | {target} if uses_dst else types))
