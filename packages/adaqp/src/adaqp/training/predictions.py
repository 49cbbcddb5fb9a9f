"""Tables of predicted classes, by the user's own ids of nodes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from adaqp.partitioning.partitioner import NODES
from shared.data.frames import read_frame
from shared.data.node_ids import NodeIds
from shared.data.tables import read_ids
from shared.errors import DataError

if TYPE_CHECKING:
    from pandas import DataFrame, Series

__all__ = ["Wanted", "read_wanted", "tabulate"]


class Wanted(NamedTuple):
    """Nodes to score.

    Attributes:
        ids: as the user calls them; None: all nodes, by their numbers.
        nodes: their numbers, -1 for ids that the graph does not have; None: all nodes.
    """

    ids: Series | np.ndarray | None
    nodes: Int64[np.ndarray, " num_wanted"] | None

    @property
    def is_unknown(self) -> Bool[np.ndarray, " num_wanted"]:
        """Which ids are none of the graph's."""
        return np.zeros(0, bool) if self.nodes is None else self.nodes < 0


def read_wanted(folder: Path, num_nodes: int, file: Path | None) -> Wanted:
    """Reads which nodes to score.

    Args:
        folder: the partition.
        num_nodes: number of the graph's nodes.
        file: table with a column id; None for all nodes.

    Raises:
        DataError: it is no table, has no such column, or none of the graph's ids.
    """
    path = folder / NODES
    known = NodeIds.load(path) if path.exists() else None
    if file is None:
        return Wanted(None if known is None else known.ids, None)
    table = read_frame(file, ids=["id"])
    if "id" not in table:
        raise DataError(f"{file}: expected a column 'id', got {list(table.columns)}; rename yours")
    try:
        column = read_ids(table["id"])
        if known is not None:
            nodes = known.find(column, "src")
        elif column.dtype.kind == "O":
            raise DataError("id: expected numbers of nodes, as the graph has no ids, got texts")
        else:
            nodes = column.to_numpy(np.int64, copy=True)
            nodes[nodes >= num_nodes] = -1
        if not (nodes >= 0).any():
            raise DataError(
                f"id: expected ids of the graph's nodes, none of {len(nodes)} is one; check them"
            )
    except DataError as error:
        raise DataError(f"{file}: {error}") from error
    return Wanted(table["id"], nodes)


def tabulate(
    wanted: Wanted, scores: Float[Tensor, "num_nodes num_classes"], is_multilabel: bool
) -> DataFrame:
    """One row a node: its id, its class and that class's score, then all scores.

    Args:
        wanted: the nodes.
        scores: probabilities of all nodes.
        is_multilabel: a node may have several classes: there is no column of one class then.
    """
    import pandas

    nodes = np.arange(len(scores)) if wanted.nodes is None else wanted.nodes
    ids = np.arange(len(scores)) if wanted.ids is None else wanted.ids
    rows = scores.numpy()[nodes]
    rows[nodes < 0] = np.nan
    columns: dict[str, object] = {"id": ids}
    if not is_multilabel:
        best = pandas.array(scores.argmax(1).numpy()[nodes], dtype="Int64")
        best[nodes < 0] = pandas.NA
        columns |= {"class": best, "score": rows.max(1)}
    columns |= {f"score_{at}": rows[:, at] for at in range(rows.shape[1])}
    return pandas.DataFrame(columns)
