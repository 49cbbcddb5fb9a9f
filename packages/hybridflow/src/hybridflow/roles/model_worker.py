"""Base class of workers that hold a model: builds a shard, reads batches, saves state."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hybridflow.models import pieces
from hybridflow.models.config import read_config
from hybridflow.models.decoder import Decoder, Shard
from hybridflow.models.optimizer import AdamW, Optimizer
from hybridflow.models.pipeline import run_forward, train
from hybridflow.models.sharding import shard_over
from hybridflow.roles.state.export import Held, write_folder
from hybridflow.workers.batch.batch import PADDING, Batch
from hybridflow.workers.protocols import remote
from hybridflow.workers.worker import Worker
from shared.comms.collectives import all_reduce
from shared.errors import ConfigError, DataError

if TYPE_CHECKING:
    from hybridflow.roles.state.sharded_state import ReaderOf, ShardedState, WriterOf

__all__ = ["ModelWorker"]

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}


class ModelWorker(Worker):
    """One rank's part of a decoder with a head, and its optimizer if it is trained.

    Attributes:
        model: this rank's part.
        version: number of optimizer steps taken.
        source: the folder that the model was loaded from, or a preset's name; None if neither.
    """

    def __init__(
        self,
        model: Any,
        *,
        head: str = "vocabulary",
        dtype: str = "float32",
        seed: int = 0,
        optimizer: AdamW | None = None,
        max_tokens: int = 16384,
        is_sharded: bool = False,
    ) -> None:
        """Builds and fills the model.

        Args:
            model: as accepted by `read_config`; weights are loaded from a folder, and randomly
                initialised for a preset.
            head: "vocabulary" or "scalar".
            dtype: of the weights.
            seed: of randomly initialised weights.
            optimizer: settings; None for a model that is not trained.
            max_tokens: most tokens of a micro-batch, padding included.
            is_sharded: whether replicas shard parameters, gradients and optimizer state (FSDP2).

        Raises:
            ConfigError: if the model, its type or the layout does not fit.
        """
        if dtype not in DTYPES:
            raise ConfigError(f"dtype: expected one of {', '.join(DTYPES)}, got {dtype!r}")
        self.config = read_config(model)
        self.source = model if isinstance(model, str | Path) else None
        pp, tp, _ = self.coordinates
        train = self.context.mesh.train
        shard = Shard(self.config, pp, train.pp, tp, train.tp, self.subgroup("tp"))
        self.model = Decoder(self.config, shard, head, self.device, DTYPES[dtype])
        self.max_tokens = max_tokens
        self._dp, self._pp = self.subgroup("dp"), self.subgroup("pp")
        self.version = 0
        self._fill(model, head, seed)
        self.model.requires_grad_(optimizer is not None)
        self.share = (0, 1)
        if is_sharded and self._dp is not None:
            self.share = (self.coordinates[2], train.dp)
            shard_over(self.model, self._dp)
        self.pieces = pieces.pieces(self.model, self.share)
        self.optimizer = (
            None if optimizer is None else Optimizer(self.model, optimizer, self._dp, self._pp)
        )

    def _fill(self, model: Any, head: str, seed: int) -> None:
        if isinstance(model, str | Path) and not str(model).startswith("config:"):
            shapes = pieces.weight_shapes(self.config, head)
            missing = pieces.load(self.model, pieces.folder_reader(model, shapes))
        elif hasattr(model, "state_dict"):
            state = model.state_dict()
            missing = pieces.load(self.model, lambda name, box: _cut(state, name, box))
        else:
            pieces.initialize(self.model, seed)
            return
        # A critic may start from a language model, which has no scalar head.
        if missing == ["score.weight"]:
            piece = next(p for p in pieces.pieces(self.model) if p.name == "score.weight")
            piece.view(self.model).zero_()
        elif missing:
            raise DataError(
                f"{model}: {len(missing)} weights are missing, the first {missing[0]!r}; is it a "
                f"folder of a {'language model' if head == 'vocabulary' else 'classifier'}?"
            )

    def read(self, batch: Batch, *names: str) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Tokens, the mask of tokens in the loss, and further columns, on this rank's device."""
        tokens = batch["tokens"].to(self.device)
        mask = batch["mask"].to(self.device)
        for name in (PADDING, "is_dropped"):
            if name in batch:
                mask = mask & ~batch[name].to(self.device)[:, None]
        return tokens, mask, [batch[name].to(self.device) for name in names]

    @torch.no_grad()
    def evaluate(
        self, inputs: Sequence[Tensor], rows: Sequence[Tensor], use: Callable[[int, Tensor], Tensor]
    ) -> Tensor | None:
        """Applies `use` to each micro-batch's hidden states; returns values in the order of rows.

        Args:
            inputs: tokens of each micro-batch.
            rows: row indices of each micro-batch in the batch.
            use: function of a micro-batch's index and hidden states to values [rows, ...].

        Returns:
            On the last stage; None on the others.
        """
        found: list[Tensor] = []
        run_forward(self.model, self._pp, inputs, lambda k, hidden: found.append(use(k, hidden)))
        if self.share[1] > 1:
            # FSDP2 keeps gathered weights after a forward pass, which may change before the next.
            self.model.reshard()  # type: ignore[operator]
        if not found:
            return None
        return torch.cat(found)[torch.argsort(torch.cat(list(rows)))].cpu()

    def train(
        self, inputs: Sequence[Tensor], loss_of: Callable[[int, Tensor], Tensor]
    ) -> dict[str, float]:
        """Takes one optimizer step on the sum of the micro-batches' losses; returns its metrics."""
        assert self.optimizer is not None, "asked of a worker that is trained"
        self.optimizer.zero_grad()
        train(self.model, self._pp, *self._in_step(inputs, loss_of))
        told = self.optimizer.step()
        self.version += 1
        return told

    def _in_step(
        self, inputs: Sequence[Tensor], loss_of: Callable[[int, Tensor], Tensor]
    ) -> tuple[Sequence[Tensor], Callable[[int, Tensor], Tensor]]:
        """Adds empty micro-batches, so that all FSDP2 replicas gather weights equally often."""
        if self.share[1] == 1:
            return inputs, loss_of
        assert self._dp is not None, "several replicas"
        count = all_reduce(self._dp, torch.tensor([len(inputs)], device=self.device), "max")
        missing = int(count) - len(inputs)
        filler = torch.zeros(1, 1, dtype=torch.int64, device=self.device)

        def scaled(k: int, hidden: Tensor) -> Tensor:
            # FSDP2 averages the replicas' gradients, but losses have to be summed.
            if k < len(inputs):
                return loss_of(k, hidden) * self.share[1]
            return hidden.sum() * 0 + self.model.head_weight.sum() * 0

        return [*inputs, *[filler] * missing], scaled

    def summed(self, values: Tensor) -> Tensor:
        """Sums over replicas; a divisor summed so does not depend on how rows are split."""
        return values if self._dp is None else all_reduce(self._dp, values)

    @remote(protocol="rank-zero")
    def num_updates(self) -> int:
        """Number of optimizer steps taken."""
        return self.version

    @remote(protocol="one-to-all")
    def save_state(self, name: str, path: str, writer_of: WriterOf) -> None:
        """Writes this rank's part of weights, optimizer and counters; see `hybridflow.Checkpoint`.

        Args:
            name: prefix of all tensors' names.
            path: a folder that does not exist yet.
            writer_of: function from a path to a storage writer.
        """
        self._state(name).save(path, writer_of, self.subgroup("all"))

    @remote(protocol="one-to-all")
    def load_state(self, name: str, path: str, reader_of: ReaderOf) -> None:
        """Reads what `save_state` wrote, whatever the layout at that time."""
        self.version = self._state(name).load(path, reader_of, self.subgroup("all"))

    def _state(self, name: str) -> ShardedState:
        # torch.distributed.checkpoint takes as long to import as torch itself.
        from hybridflow.roles.state.sharded_state import ShardedState

        self._train_layout()
        return ShardedState(name, self.model, self.pieces, self.optimizer, self.version)

    def _train_layout(self) -> None:
        """Moves the weights into `model`; overridden by workers with another layout to generate."""

    @remote(protocol="one-to-all")
    def export_weights(self, folder: str, max_file_bytes: int) -> None:
        """Writes a Hugging Face folder on rank 0; see `hybridflow.roles.state.export`."""
        self._train_layout()
        layout, kind = self.context.mesh.train, self.model.head_kind
        boxes = []
        for pp, tp, dp in map(layout.coordinates, range(self.num_ranks)):
            shard = Shard(self.config, pp, layout.pp, tp, layout.tp)
            share = (dp, layout.dp) if self.share[1] > 1 else (0, 1)
            boxes.append(pieces.shard_boxes(self.config, shard, kind, share))
        held = Held(self.model, self.pieces, boxes, self.subgroup("all"))
        write_folder(held, Path(folder), max_file_bytes, self.source)


def _cut(state: Mapping[str, Tensor], name: str, box: pieces.Box) -> Tensor | None:
    if name not in state:
        return None
    return state[name][box.within(pieces.Box((0,) * len(box.offsets), tuple(state[name].shape)))]
