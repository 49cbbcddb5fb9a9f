"""A model's state on one rank, in the format of torch.distributed.checkpoint.

Each rank writes the boxes that it holds under Hugging Face names, and reads the boxes that it wants,
however they were cut when they were written; nothing is gathered, and what several ranks hold is
written once. Everything is a tensor, counters too, so that any reader of the format can read it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DTensor

from hybridflow.box_planners import BoxLoadPlanner, BoxSavePlanner, Part
from hybridflow.models.decoder import Decoder
from hybridflow.models.optimizer import Optimizer
from hybridflow.models.pieces import Piece, weight_shapes
from shared.comms.group import Group
from shared.errors import DataError, MeshyardError
from shared.topology.boxes import Box

__all__ = ["ReaderOf", "ShardedState", "WriterOf"]

WriterOf = Callable[[str], dcp.StorageWriter]
ReaderOf = Callable[[str], dcp.StorageReader]

_SCALAR = Box((), ())


class ShardedState:
    """Where one rank's weights, optimizer state and counters lie, by their names in a checkpoint.

    Attributes:
        parts: that this rank holds.
        shapes: of all tensors that any rank holds.
        counters: read when this is made, and again by `load`.
    """

    def __init__(
        self,
        name: str,
        model: Decoder,
        pieces: Iterable[Piece],
        optimizer: Optimizer | None,
        counters: Mapping[str, int],
    ) -> None:
        """Finds them; nothing is copied.

        Args:
            name: of the group, with which all names begin.
            model: this rank's part.
            pieces: that it is in.
            optimizer: None for a model that is not trained.
            counters: by name.
        """
        self._name = name
        self._numbers = {which: torch.tensor(count) for which, count in counters.items()}
        weights = weight_shapes(model.config, model.head_kind)
        shapes: dict[str, tuple[int, ...]] = {**weights, **dict.fromkeys(counters, ())}
        for weight, shape in weights.items() if optimizer is not None else ():
            shapes[f"optimizer.step.{weight}"] = ()
            shapes[f"optimizer.exp_avg.{weight}"] = shape
            shapes[f"optimizer.exp_avg_sq.{weight}"] = shape
        self.shapes = {f"{name}.{which}": shape for which, shape in shapes.items()}
        self.parts = [
            Part(f"{name}.{which}", _SCALAR, number) for which, number in self._numbers.items()
        ]
        for piece in pieces:
            self.parts.append(Part(f"{name}.{piece.name}", piece.box, piece.view(model)))
            kinds = {} if optimizer is None else optimizer.state_of(piece.parameter)
            for kind, values in kinds.items():
                at = f"{name}.optimizer.{kind}.{piece.name}"
                is_scalar = not values.dim()
                self.parts.append(
                    Part(at, _SCALAR, values)
                    if is_scalar
                    else Part(at, piece.box, _held(piece, values))
                )

    @property
    def counters(self) -> dict[str, int]:
        """By name."""
        return {which: int(number) for which, number in self._numbers.items()}

    def save(self, path: str, writer_of: WriterOf, group: Group | None) -> None:
        """Writes it; all ranks of a group call this together.

        Args:
            path: a folder that is not there yet.
            writer_of: makes the storage of a path.
            group: None where this rank is alone.

        Raises:
            DataError: if something can not be written, on all ranks.
        """
        advice = "free space there or save elsewhere; earlier checkpoints are as they were"
        with _told(f"{path} can not be written", advice):
            dcp.save(
                {},
                storage_writer=writer_of(path),
                planner=BoxSavePlanner(self.parts, self.shapes),
                process_group=None if group is None else group.checked(),
                no_dist=group is None,
            )

    def load(self, path: str, reader_of: ReaderOf, group: Group | None) -> None:
        """Reads it in place; arguments as of `save`, with the storage that was written to.

        Raises:
            DataError: on all ranks, if it is another model's state, before anything is read; or if
                it can not be read.
        """
        with _told(f"{path} can not be read", "load an earlier checkpoint"):
            dcp.load(
                {},
                storage_reader=reader_of(path),
                planner=BoxLoadPlanner(path, self.parts, self.shapes, f"{self._name}.optimizer."),
                process_group=None if group is None else group.checked(),
                no_dist=group is None,
            )


def _held(piece: Piece, values: Tensor) -> Tensor:
    """What a piece is of a tensor in its parameter's shape."""
    local = values.to_local() if isinstance(values, DTensor) else values
    return local[piece.rows].t() if piece.is_transposed else local[piece.rows]


@contextmanager
def _told(what: str, advice: str) -> Iterator[None]:
    """Raises what torch wraps in something that is no `Exception`, and so would end the rank."""
    try:
        with warnings.catch_warnings():
            # A rank that is alone is meant to be.
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            yield
    except CheckpointException as error:
        rank, (cause, _) = min(error.failures.items(), key=lambda failure: failure[0])
        if isinstance(cause, MeshyardError):
            raise cause from None
        told = f"{type(cause).__name__}: {cause}"
        raise DataError(f"{what}, says rank {rank}: {told}. {advice}") from error
