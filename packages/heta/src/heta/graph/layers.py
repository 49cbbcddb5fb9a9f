"""Which relations each layer of a model computes."""

from heta.graph.schema import Relation, Schema
from shared.errors import ConfigError, DataError

__all__ = ["list_active_relations"]


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
