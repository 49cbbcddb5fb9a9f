"""Trains a model over parts and replicas, with the result of one process.

Ranks are a grid: rank = part * replicas + replica. All parts of a replica work on the same seeds; the
replicas share a batch out. "replicate" and "edge-cut" are grids of one part: they differ in where
rows lie.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any, get_args

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from torch.distributed.checkpoint import StorageReader, StorageWriter

from heta.graph.part import Part
from heta.graph.sampler import check_fanouts, read_seeds
from heta.nn.hetero_model import HeteroModel, LocalExchange
from heta.rows.cache import Cache
from heta.rows.optimizers import RowAdam, RowOptimizer
from heta.rows.store import InputRows, RowRequest
from heta.rows.tables import make_tables
from heta.training.agreement import sum_losses
from heta.training.cache_filling import SAMPLED_BATCHES, fill_device, fill_remote
from heta.training.checkpoint import load_checkpoint, save_checkpoint
from heta.training.checks import (
    check_logits,
    check_model,
    check_modules,
    check_ranks,
    evaluating,
)
from heta.training.evaluation import Evaluation, evaluate_logits
from heta.training.exchange import PartExchange, Wire, choose_host_group
from heta.training.gradients import GradientSync
from heta.training.prefetch import BatchReader, PreparedBatch
from shared.comms import Group, all_gather_v
from shared.errors import ConfigError, DataError
from shared.kernels.philox import stream_key
from shared.training.messages import check_loss
from shared.training.progress import show_progress

__all__ = ["EpochReport", "Trainer"]

_NUMBERS = count()
_EVALUATION_EPOCH = (1 << 62) + 1
"""Names the draws of predictions, which are the same at any time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochReport:
    """One epoch on this rank.

    Attributes:
        epoch: its number, from 0.
        loss: mean cross entropy over the epoch's seeds, before each step's update.
        num_steps: optimizer steps.
        seconds: of the whole epoch.
        phases: seconds by phase: "sample" (waiting for the batch and its features), "rows" (learnable
            ones), "forward" and "backward" with their exchanges, "sync", "update"; and "features",
            which are read behind the step before.
        sent_bytes: bytes that this rank sent.
    """

    epoch: int
    loss: float
    num_steps: int
    seconds: float
    phases: dict[str, float]
    sent_bytes: int

    def __str__(self) -> str:
        phases = ", ".join(
            f"{name} {s / max(self.seconds, 1e-9):.0%}" for name, s in self.phases.items()
        )
        return (
            f"epoch {self.epoch}: loss {self.loss:.4f}, {self.seconds:.2f} s for {self.num_steps} steps "
            f"({phases}), {self.sent_bytes / 1e6:.1f} MB sent"
        )


class Trainer:
    """Trains a model over the parts of a plan; every rank makes one and calls it alike.

    Args:
        part: this rank's part, from `heta.load`.
        model: a `HeteroModel` over that part, on the CPU or on a GPU.
        fanouts: most in-edges of a node and relation, the hop next to the seeds first, -1 for all;
            None takes the plan's.
        batch_size: seeds of a step over all ranks; None takes the plan's.
        optimizer: makes the optimizer of the model's parameters.
        rows: optimizer of learnable rows.
        cache: with "edge-cut" of other ranks' features; else of this host's rows on the model's GPU.
        wire: form in which states travel: "float32", "bfloat16" or "int8".
        seed: of the order of seeds, sampling, learnable rows and shared dropout.
        check_every: steps between comparisons of what all parts should hold alike; 0 for never.

    Raises:
        ConfigError: an option is invalid, or parts, ranks and the model do not fit.
        DataError: ranks hold parts of different plans.
    """

    def __init__(
        self,
        part: Part,
        model: HeteroModel,
        fanouts: Sequence[int] | None = None,
        batch_size: int | None = None,
        *,
        optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None = None,
        rows: RowOptimizer | None = None,
        cache: Cache | None = None,
        wire: Wire = "float32",
        seed: int = 0,
        check_every: int = 1,
    ) -> None:
        if not isinstance(model, HeteroModel):
            raise ConfigError(
                f"model: expected a heta.nn.HeteroModel over the part, got {type(model).__name__}"
            )
        if wire not in get_args(Wire):
            raise ConfigError(f"wire: expected one of {', '.join(get_args(Wire))}, got {wire!r}")
        self.fanouts = check_fanouts(part.fanouts if fanouts is None else fanouts, part.layers)
        self.batch_size = part.batch_size if batch_size is None else batch_size
        if self.batch_size < 1:
            raise ConfigError(f"batch_size: expected 1 or more, got {self.batch_size}")
        if check_every < 0:
            raise ConfigError(f"check_every: expected 0 or more, got {check_every}")
        self.part, self.model, self.seed = part, model, seed
        self.device = next(model.parameters(), torch.empty(0)).device
        self.group = choose_host_group(Group.world()) if Group.exists() else None
        rank, ranks = (0, 1) if self.group is None else (self.group.rank, self.group.world_size)
        check_ranks(part, self.group)
        check_model(model, part)
        self.num_replicas = ranks // part.num_parts
        self.replica = rank % self.num_replicas
        self._exchange = self._make_exchange(ranks, wire, check_every)
        rows = rows or RowAdam()
        # Numbered, since each trainer has a thread of its own that exchanges messages.
        reading = f"heta reader {next(_NUMBERS)}"
        reader_group = Group.control(name=reading) if self.group is not None else None
        tables = make_tables(part, self.group, rows, seed, self.device)
        self.store = InputRows(tables, rows, self.group, reader_group, self.device)
        if cache is not None:
            self._fill_caches(cache)
        self.sync = GradientSync(model, part, self.group)
        self.sync.share_initial_values()
        self.optimizer = (optimizer or _adam)(model.parameters())
        self.epoch, self.step_number = 0, 0
        self._reader = BatchReader(part, self.store, seed, reader_group, check_every)
        self._is_checked = self._has_gradients = False
        self.phases: dict[str, float] = {}
        self._requests: dict[str, RowRequest] = {}

    def _make_exchange(
        self, ranks: int, wire: Wire, check_every: int
    ) -> PartExchange | LocalExchange:
        """One group a replica, with one rank of each part; every rank makes all of them."""
        if self.group is None or self.part.num_parts == 1:
            return LocalExchange()
        own = None
        for replica in range(self.num_replicas):
            group = Group.of(range(replica, ranks, self.num_replicas))
            own = group if replica == self.replica else own
        assert own is not None, "each rank is a replica of its part"
        return PartExchange(own, wire, self.seed, check_every, self.device)

    def _fill_caches(self, cache: Cache) -> None:
        is_remote = self.part.strategy == "edge-cut"
        if not is_remote and self.device.type == "cpu":
            raise ConfigError(
                f"cache: expected a plan by edge-cut, whose features lie on other hosts, or a model on a "
                f"GPU, got {self.part.strategy!r} and a model on the CPU; leave the cache out"
            )
        num_nodes = self.part.schema.num_nodes[self.part.schema.target]
        is_seed = self.part.masks.get("train", torch.ones(num_nodes, dtype=torch.bool))
        seeds = is_seed.nonzero()[:, 0]
        generator = torch.Generator().manual_seed(self.seed)
        drawn = seeds[torch.randperm(len(seeds), generator=generator)]
        own = self._choose_seeds(drawn[: SAMPLED_BATCHES * self.batch_size])
        fill = fill_remote if is_remote else fill_device
        fill(self.store, self.part, cache, own, self.fanouts, self.seed)

    def backward(self, seeds: Any, *, epoch: int | None = None, step: int | None = None) -> float:
        """Computes the mean cross entropy of a batch and its gradients, and updates nothing.

        Gradients of parameters are those of one process, on every rank that holds them. Those of
        learnable rows wait for `update`.

        Args:
            seeds: ids of the whole batch over all ranks, a tensor, array or list, the same on every
                rank. One that is named twice counts twice, one without a label for nothing.
            epoch, step: name the random draws; None takes the trainer's own count.

        Returns:
            The loss of the whole batch.

        Raises:
            DataError: there are no labels, or a seed is no node of the target.
            DivergenceError: the loss is not finite.
            CommError: a rank died, the timeout passed, or ranks' states differ.
        """
        epoch = self.epoch if epoch is None else epoch
        step = self.step_number if step is None else step
        seeds = read_seeds(seeds, self.part.schema)
        own = self._choose_seeds(seeds)
        pending = self._reader.submit(seeds, own, self.fanouts, epoch, step)
        return self._backward(self._reader.receive(pending), seeds, epoch, step)

    def update(self) -> None:
        """Applies the gradients that `backward` left: to parameters, and to learnable rows.

        Raises:
            ConfigError: no `backward` has completed since the last update.
        """
        if not self._has_gradients:
            raise ConfigError(
                "update: expected gradients of `backward`, there are none; call it first"
            )
        self._has_gradients = False
        with self._phase("update"):
            self.optimizer.step()
            self.store.give_back(self._requests)
            self._requests = {}
        self.step_number += 1

    def step(self, seeds: Any) -> float:
        """Trains on one batch; the arguments and errors are `backward`'s."""
        loss = self.backward(seeds)
        self.update()
        return loss

    def batches(self, split: str = "train") -> list[Int64[Tensor, " seeds"]]:
        """Lists an epoch's batches of a split: every labelled seed once, in a random order."""
        seeds = self.part.seeds(split)
        generator = torch.Generator().manual_seed(stream_key(self.seed, self.epoch) >> 1)
        return list(seeds[torch.randperm(len(seeds), generator=generator)].split(self.batch_size))

    def steps(self, batches: Sequence[Any]) -> Iterator[float]:
        """Trains on batches one after another, and yields each one's loss.

        The next batch is sampled and its features are read while a step runs. Arguments and errors
        are `backward`'s.
        """
        batches = [read_seeds(seeds, self.part.schema) for seeds in batches]
        pending = self._prefetch(batches[0], self.step_number) if batches else None
        for number, seeds in enumerate(batches):
            assert pending is not None, "there is a batch"
            with self._phase("sample"):
                prepared = self._reader.receive(pending)
            if number + 1 < len(batches):
                pending = self._prefetch(batches[number + 1], self.step_number + 1)
            loss = self._backward(prepared, seeds, self.epoch, self.step_number)
            self.update()
            yield loss

    def fit_epoch(self, split: str = "train") -> EpochReport:
        """Trains on every labelled seed of a split once.

        It goes on after the batches for which `step` was called or `load` read that they are done, and
        with the next epoch if these were all.

        Raises:
            DataError: the split has no labelled seeds.
        """
        batches = self.batches(split)
        if not batches:
            raise DataError(f"split {split!r}: expected nodes with a label, there are none")
        if self.step_number >= len(batches):
            self.epoch, self.step_number = self.epoch + 1, 0
            batches = self.batches(split)
        self.phases = {}
        began = time.perf_counter()
        sent = self._sent_bytes()
        first, losses = self.step_number, []
        is_shown = self.group is None or self.group.rank == 0
        text = f"epoch {self.epoch}"
        with show_progress(text, len(batches), is_shown=is_shown) as progress:
            for batch, loss in zip(batches[first:], self.steps(batches[first:]), strict=True):
                losses.append(loss * len(batch))
                progress.advance()
        count = sum(len(batch) for batch in batches[first:])
        report = EpochReport(
            epoch=self.epoch,
            loss=sum(losses) / count,
            num_steps=len(losses),
            seconds=time.perf_counter() - began,
            phases=dict(self.phases),
            sent_bytes=self._sent_bytes() - sent,
        )
        self.epoch, self.step_number = self.epoch + 1, 0
        return report

    @torch.no_grad()
    def predict(
        self, seeds: Any, fanouts: Sequence[int] | None = None
    ) -> Float[Tensor, "seeds classes"]:
        """Computes the logits of any target nodes, on every rank.

        Args:
            seeds: ids, the same on every rank.
            fanouts: as of training; None takes the trainer's. What is drawn does not depend on time.

        Returns:
            Logits in the host's memory.

        Raises:
            DataError: a seed is no node of the target.
            CommError: a rank died, or the timeout passed.
        """
        seeds = read_seeds(seeds, self.part.schema)
        fanouts = self.fanouts if fanouts is None else check_fanouts(fanouts, self.part.layers)
        parts = []
        with evaluating(self.model):
            for chunk in seeds.split(self.batch_size):
                own = self._choose_seeds(chunk)
                pending = self._reader.submit(chunk, own, fanouts, _EVALUATION_EPOCH, 0)
                prepared = self._reader.receive(pending)
                logits, learnable = self._forward(prepared, with_gradients=False)
                self.store.release(prepared.features | learnable)
                parts.append(self._gather_logits(chunk, logits))
        return torch.cat(parts) if parts else torch.empty(0, 0)

    def evaluate(self, split: str, fanouts: Sequence[int] | None = None) -> Evaluation:
        """Compares predictions with the labels of every labelled node of a split, on every rank.

        Raises:
            DataError: there are no labels, or no such split.
        """
        seeds = self.part.seeds(split)
        assert self.part.label is not None, "the split has labelled nodes"
        return evaluate_logits(self.predict(seeds, fanouts), self.part.label[seeds])

    def save(self, path: str | os.PathLike[str], *, writer: StorageWriter | None = None) -> None:
        """Writes a checkpoint that any number of parts can load; every rank calls it.

        It holds parameters, optimizer, learnable rows with their optimizer, and how far the epoch is.
        Random numbers that modules drew are not part of it.

        Args:
            path: folder to write, replaced once the new one is complete.
            writer: a storage writer of torch.distributed.checkpoint, which writes where it was told.

        Raises:
            OSError: the folder cannot be written.
        """
        progress = {
            "epoch": self.epoch,
            "step": self.step_number,
            "seed": self.seed,
            "batch_size": self.batch_size,
            "graph": self._graph_fingerprint,
        }
        save_checkpoint(
            path, model=self.model, optimizer=self.optimizer, tables=self.store.tables,
            progress=progress, group=self.group, writer=writer,
        )  # fmt: skip

    def load(self, path: str | os.PathLike[str], *, reader: StorageReader | None = None) -> None:
        """Reads what `save` wrote, also with another number of parts; every rank calls it.

        The next `fit_epoch` resumes where the checkpoint stopped.

        Args:
            path: the folder.
            reader: a storage reader of torch.distributed.checkpoint.

        Raises:
            DataError: there is no checkpoint, or it is of another graph, model, seed or batch size.
        """
        about = load_checkpoint(
            path, model=self.model, optimizer=self.optimizer, tables=self.store.tables,
            group=self.group, graph=self._graph_fingerprint, reader=reader,
        )  # fmt: skip
        if about["step"] and (about["seed"], about["batch_size"]) != (self.seed, self.batch_size):
            raise DataError(
                f"{os.fspath(path)}: expected seed {self.seed} and batch_size {self.batch_size}, got "
                f"{about['seed']} and {about['batch_size']}, with which its epoch was begun; use those"
            )
        self.epoch, self.step_number = about["epoch"], about["step"]
        self._has_gradients, self._requests = False, {}

    @property
    def _graph_fingerprint(self) -> str:
        return self.part.fingerprint.partition("-")[2]

    def close(self) -> None:
        """Ends the thread that prepares batches."""
        self._reader.close()

    def _choose_seeds(self, seeds: Tensor) -> Tensor:
        """The seeds of this rank's replica."""
        owner = self.part.node_owner.get(self.part.schema.target)
        if owner is not None:
            return seeds[owner[seeds] == self.replica]
        return seeds[self.replica :: self.num_replicas]

    def _prefetch(self, seeds: Tensor, step: int) -> Future[PreparedBatch]:
        own = self._choose_seeds(seeds)
        return self._reader.submit(seeds, own, self.fanouts, self.epoch, step)

    def _backward(self, prepared: PreparedBatch, seeds: Tensor, epoch: int, step: int) -> float:
        batch = prepared.batch
        label = self.part.label
        if label is None:
            raise DataError("expected a graph with labels, it has none; pass label= to HeteroGraph")
        # One process counts the whole batch; every rank knows all labels.
        count = max(int((label[seeds] >= 0).sum()), 1)
        if not self._is_checked:
            check_modules(self.model)
            self._is_checked = True
        self.optimizer.zero_grad(set_to_none=True)
        self._has_gradients = False
        logits, requests = self._forward(prepared, epoch, step, with_gradients=True)
        check_logits(logits, batch, self.part)
        loss = nn.functional.cross_entropy(
            logits, label[batch.seeds].to(logits.device), ignore_index=-1, reduction="sum"
        )
        loss = loss / count
        with self._phase("backward"):
            # Other parts may train what this one does not hold.
            if loss.requires_grad or self.group is None:
                loss.backward()
        self.store.release(prepared.features)
        with self._phase("sync"):
            self.sync.sum_gradients()
            total = float(loss.detach())
            if self.num_replicas > 1 and self.group is not None:
                total = sum_losses(self.group, total, self.num_replicas)
        check_loss(total, f"epoch {epoch}, step {step}")
        self._requests, self._has_gradients = requests, True
        return total

    def _forward(
        self,
        prepared: PreparedBatch,
        epoch: int = 0,
        step: int = 0,
        *,
        with_gradients: bool,
    ) -> tuple[Tensor, dict[str, RowRequest]]:
        batch, position = prepared.batch, prepared.seed_position
        self._count_phase("features", prepared.features_s)
        with self._phase("rows"):
            learnable = self.store.read_learnable(prepared.wanted, with_gradients=with_gradients)
            read = prepared.features | learnable
            inputs = {name: read[name].rows[: len(ids)] for name, ids in batch.inputs.items()}
            seed_rows = None
            if position is not None:
                seed_rows = read[self.part.schema.target].rows[position.to(self.device)]
        with self._phase("forward"):
            self._exchange.begin(epoch, step)
            logits = self.model(batch, inputs, seed_rows, self._exchange)
            self._exchange.check()
        return logits, learnable

    def _gather_logits(self, seeds: Tensor, own: Tensor) -> Tensor:
        if self.num_replicas == 1 or self.group is None:
            return own.cpu()
        gathered = all_gather_v(self.group, own.cpu().contiguous())
        logits = gathered[0].new_empty(len(seeds), own.shape[1])
        owner = self.part.node_owner.get(self.part.schema.target)
        for replica in range(self.num_replicas):
            where = (
                slice(replica, None, self.num_replicas)
                if owner is None
                else owner[seeds] == replica
            )
            logits[where] = gathered[replica]
        return logits

    def _sent_bytes(self) -> int:
        return 0 if self.group is None else self.group.ledger.sent_bytes

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self._count_phase(name, time.perf_counter() - began)

    def _count_phase(self, name: str, seconds: float) -> None:
        self.phases[name] = self.phases.get(name, 0.0) + seconds


def _adam(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, 1e-2)
