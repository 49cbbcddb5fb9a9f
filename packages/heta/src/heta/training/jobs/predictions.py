"""The work of `heta predict`: logits by a checkpoint, and tables by the user's own ids of nodes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from heta.config import TrainConfig
from heta.graph.part import load
from heta.graph.part_files import TargetNames
from heta.training.jobs.launch import run_in_ranks
from heta.training.jobs.training_run import STATE, make_trainer, read_run
from shared.data.frames import read_frame
from shared.data.tables import read_ids
from shared.errors import DataError

if TYPE_CHECKING:
    from pandas import DataFrame

__all__ = ["Selection", "predict_logits", "select_nodes", "tabulate"]


@dataclass(frozen=True, slots=True, eq=False)
class Selection:
    """Nodes to score.

    Attributes:
        ids: as the user calls them.
        nodes: their numbers, -1 for ids that the graph lacks.
    """

    ids: np.ndarray
    nodes: np.ndarray


def select_nodes(names: TargetNames, file: Path | None) -> Selection:
    """Reads which nodes to score.

    Args:
        names: the graph's own ids.
        file: table with a column id; None for all nodes.

    Raises:
        DataError: it is no table, has no such column, or none of the graph's ids.
    """
    numbers = np.arange(names.num_nodes)
    own = numbers if names.ids is None else np.asarray(names.ids, object)
    if file is None:
        return Selection(own, numbers)
    table = read_frame(file, ids=["id"])
    if "id" not in table:
        raise DataError(f"{file}: expected a column 'id', got {list(table.columns)}; rename yours")
    try:
        ids = read_ids(table["id"]).astype(str).to_numpy(object)
    except DataError as error:
        raise DataError(f"{file}: {error}") from error
    number_of = {str(name): number for number, name in enumerate(own)}
    nodes = np.array([number_of.get(name, -1) for name in ids], np.int64)
    if not (nodes >= 0).any():
        raise DataError(
            f"{file}: expected ids of the graph's nodes, none of {len(nodes)} is one; check them"
        )
    return Selection(table["id"].to_numpy(), nodes)


def tabulate(
    selection: Selection, logits: Float[Tensor, "known classes"], names: TargetNames
) -> DataFrame:
    """Makes a row for each node: id, class, its probability, then those of all classes.

    Args:
        selection: the nodes; those that the graph lacks get empty fields.
        logits: of the others, in order.
        names: the classes' own names.
    """
    import pandas

    probabilities = logits.double().softmax(1).numpy()
    is_known = selection.nodes >= 0
    rows = np.full((len(selection.nodes), probabilities.shape[1]), np.nan)
    rows[is_known] = probabilities
    top = probabilities.argmax(1)
    labels = names.classes or range(rows.shape[1])
    classes = np.full(len(rows), None, object)
    classes[is_known] = np.array(labels, object)[top]
    best = np.full(len(rows), np.nan)
    best[is_known] = probabilities.max(1)
    columns: dict[str, object] = {"id": selection.ids, "class": classes, "probability": best}
    columns |= {f"p_{label}": rows[:, number] for number, label in enumerate(labels)}
    return pandas.DataFrame(columns)


def predict_logits(
    folder: str, checkpoint: Path, nodes: list[int] | None, num_ranks: int
) -> torch.Tensor | None:
    """Computes logits of target nodes by a run's checkpoint.

    Args:
        folder: the parts.
        checkpoint: the run's folder.
        nodes: ids; None for all nodes of the target.
        num_ranks: ranks to start where torchrun has started none.

    Returns:
        [nodes, classes]; None on ranks of torchrun's other than the first.

    Raises:
        ConfigError: settings do not fit the parts.
        DataError: there are no parts, no checkpoint, or it is of another graph.
    """
    # Where a run trained, and what it cached, changes no prediction, and this machine may have neither.
    config = replace(read_run(checkpoint)[0], device="cpu", cache=None)
    args = (folder, config, checkpoint, nodes)
    return run_in_ranks(num_ranks, _predict_in_rank, *args)


def _predict_in_rank(
    folder: str, config: TrainConfig, checkpoint: Path, nodes: list[int] | None
) -> torch.Tensor:
    part = load(folder)
    trainer = make_trainer(part, config)
    try:
        trainer.load(checkpoint / STATE)
        num_nodes = part.schema.num_nodes[part.schema.target]
        return trainer.predict(torch.arange(num_nodes) if nodes is None else torch.tensor(nodes))
    finally:
        trainer.close()
