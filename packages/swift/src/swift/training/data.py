"""Data and random numbers as pure functions of (seed, step, rank): a repeated step repeats itself."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch.utils.data import IterableDataset

from shared.errors import ConfigError
from shared.kernels.philox import stream_key

__all__ = ["Placed", "StepData", "reseed", "step_positions"]


def reseed(seed: int, step: int, rank: int, micro_batch: int = 0) -> None:
    """Seeds the generators of torch (on all devices), numpy and `random` for one rank's step."""
    key = stream_key(seed, step, rank, micro_batch)
    torch.manual_seed(key >> 1)  # below 2^63
    np.random.seed(key & 0xFFFFFFFF)
    random.seed(key)


def step_positions(num_samples: int, global_batch: int, seed: int, step: int) -> list[int]:
    """Places of one step's samples in the dataset, of all ranks.

    Steps read one shuffled pass over the dataset after another without a gap, so a batch may span
    two passes.
    """
    found: list[int] = []
    start = step * global_batch
    while len(found) < global_batch:
        number, offset = divmod(start + len(found), num_samples)
        found += _shuffled(num_samples, seed, number)[
            offset : offset + global_batch - len(found)
        ].tolist()
    return found


_passes: dict[tuple[int, int, int], torch.Tensor] = {}


def _shuffled(num_samples: int, seed: int, number: int) -> torch.Tensor:
    key = (num_samples, seed, number)
    if key not in _passes:
        while len(_passes) > 2:
            _passes.pop(next(iter(_passes)))
        generator = torch.Generator().manual_seed(stream_key(seed, number) >> 1)
        _passes[key] = torch.randperm(num_samples, generator=generator)
    return _passes[key]


@runtime_checkable
class Placed(Protocol):
    """Where a rank is in the run: what `join` returns has these.

    Attributes:
        rank: this process's; None on a waiting spare.
        world_size: number of ranks.
        reads_whole_batches: each rank reads all samples of a step, as a pipeline's stages do.
    """

    rank: int | None
    world_size: int
    reads_whole_batches: bool


class StepData:
    """A dataset read by step: `data[step]` is this rank's part of the step's batch, collated.

    The samples follow from seed, step, rank and number of ranks alone.
    """

    def __init__(
        self,
        dataset: Any,
        global_batch: int,
        seed: int = 0,
        *,
        run: Placed | None = None,
        shared_by: int = 1,
        collate: Callable[[list[Any]], Any] | None = None,
    ) -> None:
        """Describes the data; nothing is read yet.

        Args:
            dataset: has a length and gives sample i by `dataset[i]`.
            global_batch: samples of a step, of all ranks together; a multiple of the ranks.
            seed: of the order.
            run: of `swift.join`; None: the one this process has joined.
            shared_by: neighbouring ranks that read the same samples, as those of one tensor parallel
                replica do.
            collate: makes a batch from a list of samples; torch's `default_collate` when None.

        Raises:
            ConfigError: the dataset has no length or less samples than a batch, or a number is not
                positive.
        """
        is_stream = isinstance(
            dataset, IterableDataset
        )  # some have a length, and all a __getitem__
        if is_stream or not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
            raise ConfigError(
                f"dataset: expected one with a length and samples by number, got "
                f"{type(dataset).__name__}; a step that is repeated must read the same samples again, "
                f"so read a stream into a list or a file first"
            )
        if len(dataset) < 1 or global_batch < 1 or shared_by < 1:
            raise ConfigError(
                f"expected at least one sample and a positive global_batch and shared_by, got "
                f"{len(dataset)} samples, global_batch={global_batch} and shared_by={shared_by}"
            )
        if len(dataset) < global_batch:
            raise ConfigError(
                f"global_batch: expected at most the dataset's {len(dataset)} samples, got "
                f"{global_batch}, so a step would read samples twice; choose a smaller one"
            )
        self.dataset = dataset
        self.global_batch = global_batch
        self.seed = seed
        self._run = run
        self._shared_by = shared_by
        self._collate = collate

    def __getitem__(self, step: int) -> Any:
        """This rank's samples of a step, collated.

        Raises:
            ConfigError: the global batch cannot be divided by the ranks, or this is a waiting spare.
        """
        samples: Sequence[Any] = [self.dataset[i] for i in self.positions(step)]
        if self._collate is not None:
            return self._collate(list(samples))
        return torch.utils.data.default_collate(list(samples))

    def positions(self, step: int) -> list[int]:
        """Places of this rank's samples of a step in the dataset.

        Raises:
            ConfigError: the global batch cannot be divided by the ranks, or this is a waiting spare.
        """
        run = self._run or _current()
        if run.rank is not None and run.reads_whole_batches:
            return step_positions(len(self.dataset), self.global_batch, self.seed, step)
        readers, odd = divmod(run.world_size, self._shared_by)
        if run.rank is None or odd or self.global_batch % readers:
            shared = f", {self._shared_by} of which share samples" if self._shared_by > 1 else ""
            raise ConfigError(
                f"global_batch: expected a multiple of the {run.world_size} ranks{shared}, on a rank, "
                f"got {self.global_batch} on rank {run.rank}"
            )
        share = self.global_batch // readers
        every = step_positions(len(self.dataset), self.global_batch, self.seed, step)
        place = run.rank // self._shared_by
        return every[place * share : (place + 1) * share]


_joined: list[Placed] = []


def set_current(run: Placed) -> None:
    """Says which run this process has joined."""
    _joined[:] = [run]


def _current() -> Placed:
    if not _joined:
        raise ConfigError("expected swift.join() before the first batch is read")
    return _joined[0]
