"""A model's state on one rank, in the format of torch.distributed.checkpoint.

Each rank writes the boxes that it holds under Hugging Face names, and reads the boxes it needs,
whatever layout wrote them; nothing is gathered, and boxes that several ranks hold are written once.
All state is stored as tensors, even counters, so that any reader of the format can read it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from hybridflow.models.decoder import Decoder
from hybridflow.models.optimizer import Optimizer
from hybridflow.models.pieces import Piece, local, weight_shapes
from hybridflow.roles.state.dcp_planners import BoxLoadPlanner, BoxSavePlanner, TensorPart
from shared.comms.group import Group
from shared.errors import DataError, MeshyardError
from shared.topology.boxes import Box

__all__ = ["ReaderOf", "ShardedState", "WriterOf"]

WriterOf = Callable[[str], dcp.StorageWriter]
ReaderOf = Callable[[str], dcp.StorageReader]

_SCALAR = Box((), ())


class ShardedState:
    """One rank's weights, optimizer state and counters, by their names in a checkpoint.

    Attributes:
        parts: boxes that this rank holds.
        shapes: of all tensors of which any rank holds a part, by name.
    """

    def __init__(
        self,
        name: str,
        model: Decoder,
        pieces: Iterable[Piece],
        optimizer: Optimizer | None,
        version: int,
    ) -> None:
        """Lists a rank's state without copying it.

        Args:
            name: of the group; prefix of all names.
            model: this rank's part.
            pieces: pieces of its weights.
            optimizer: None for a model that is not trained.
            version: number of optimizer steps taken.
        """
        self._name, self._optimizer = name, optimizer
        counters = {} if optimizer is None else optimizer.counters
        numbers = {"version": version} | {f"optimizer.{key}": n for key, n in counters.items()}
        self._numbers = {key: torch.tensor(number) for key, number in numbers.items()}
        weights = weight_shapes(model.config, model.head_kind)
        shapes: dict[str, tuple[int, ...]] = {**weights, **dict.fromkeys(numbers, ())}
        for weight, shape in weights.items() if optimizer is not None else ():
            shapes[f"optimizer.step.{weight}"] = ()
            shapes[f"optimizer.exp_avg.{weight}"] = shape
            shapes[f"optimizer.exp_avg_sq.{weight}"] = shape
        self.shapes = {f"{name}.{which}": shape for which, shape in shapes.items()}
        self.parts = [
            TensorPart(f"{name}.{which}", _SCALAR, number)
            for which, number in self._numbers.items()
        ]
        for piece in pieces:
            self.parts.append(TensorPart(f"{name}.{piece.name}", piece.box, piece.view(model)))
            state = {} if optimizer is None else optimizer.state_of(piece.parameter)
            for kind, values in state.items():
                box, held = (piece.box, _held(piece, values)) if values.dim() else (_SCALAR, values)
                self.parts.append(TensorPart(f"{name}.optimizer.{kind}.{piece.name}", box, held))

    def save(self, path: str, writer_of: WriterOf, group: Group | None) -> None:
        """Writes the state; all ranks of a group call this together.

        Args:
            path: a folder that does not exist yet.
            writer_of: function from a path to a storage writer.
            group: the ranks; None if this rank is alone.

        Raises:
            DataError: on all ranks, if something cannot be written.
        """
        try:
            with _alone_quietly():
                dcp.save(
                    {},
                    storage_writer=writer_of(path),
                    planner=BoxSavePlanner(self.parts, self.shapes),
                    process_group=None if group is None else group.checked(),
                    no_dist=group is None,
                )
        except CheckpointException as error:
            raise DataError(
                f"{path} cannot be written: {_cause(error)}; save elsewhere, earlier checkpoints are "
                "unchanged"
            ) from error

    def load(self, path: str, reader_of: ReaderOf, group: Group | None) -> int:
        """Reads the state in place; arguments as in `save`, with a function to a storage reader.

        Returns:
            The version of the weights.

        Raises:
            DataError: on all ranks, if it is another model's state (found before any read), or if
                it cannot be read.
        """
        planner = BoxLoadPlanner(path, self.parts, self.shapes, f"{self._name}.optimizer.")
        try:
            with _alone_quietly():
                dcp.load(
                    {},
                    storage_reader=reader_of(path),
                    planner=planner,
                    process_group=None if group is None else group.checked(),
                    no_dist=group is None,
                )
        except CheckpointException as error:
            raise DataError(
                f"{path} cannot be read: {_cause(error)}. Load an earlier checkpoint"
            ) from error
        numbers = {key: int(number) for key, number in self._numbers.items()}
        if self._optimizer is not None:
            self._optimizer.resume(
                {key: numbers[f"optimizer.{key}"] for key in self._optimizer.counters}
            )
        return numbers["version"]


def _held(piece: Piece, values: Tensor) -> Tensor:
    """A piece's part of a tensor that has its parameter's shape."""
    held = local(values)[piece.rows]
    return held.t() if piece.is_transposed else held


@contextmanager
def _alone_quietly() -> Iterator[None]:
    """Suppresses torch's warning that there is no process group, which is intended here."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        yield


def _cause(error: CheckpointException) -> str:
    """The first cause; torch's own error is not an `Exception`, and would end the rank."""
    rank, (cause, _) = min(error.failures.items(), key=lambda failure: failure[0])
    if isinstance(cause, MeshyardError | KeyboardInterrupt):
        raise cause from None
    return f"{type(cause).__name__}: {cause} (rank {rank})"
