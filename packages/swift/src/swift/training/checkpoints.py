"""Checkpoints every n steps, through torch's DCP or another writer of its interface.

They are what is left when all replicas of a state are lost and no log has its messages, and what a
run resumes from. A checkpoint counts once its mark is written, behind a vote of all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shared.comms import Group, barrier
from shared.errors import CommError, ConfigError, DataError
from shared.files import naming_full_disk
from swift.injection import reach
from swift.training.checkpoint_folder import open_folder
from swift.training.trainable import Fillable, Trainable

__all__ = ["Every"]

_MARK = "COMMITTED"


@dataclass(frozen=True, slots=True)
class Every:
    """When and where checkpoints are written.

    Attributes:
        steps: between two checkpoints.
        folder: reachable from all hosts, a path or a URL for fsspec as "s3://bucket/run"; a checkpoint is
            `step-<n>` in it.
        writer: makes torch DCP's StorageWriter for a checkpoint's path or URL; DCP's own when None.
        reader: makes the StorageReader.
        keep: newest checkpoints that are kept.

    Raises:
        ConfigError: `steps` or `keep` is below 1, or `folder` is a URL that fsspec cannot open.
    """

    steps: int
    folder: str | Path
    writer: Callable[[str], Any] | None = None
    reader: Callable[[str], Any] | None = None
    keep: int = 2

    def __post_init__(self) -> None:
        """Checks the numbers."""
        if self.steps < 1 or self.keep < 1:
            raise ConfigError(
                f"expected at least one step between checkpoints and one checkpoint kept, got "
                f"steps={self.steps}, keep={self.keep}"
            )
        open_folder(self.folder)

    def latest(self) -> int:
        """Step of the newest committed checkpoint, 0 without one."""
        return max(self._committed(), default=0)

    def is_due(self, step: int) -> bool:
        """Whether a checkpoint of this step is to be written."""
        return step > 0 and step % self.steps == 0 and step not in self._committed()

    def save(self, group: Group, trainable: Trainable, step: int) -> None:
        """Writes a checkpoint; all ranks call it, at the same step.

        Raises:
            CommError: a rank was lost; what was written does not count.
            DiskFullError: the disk has no room for it; the checkpoint before stays.
        """
        import torch.distributed.checkpoint as dcp

        barrier(group)  # every rank knows by now whether this step has one
        name, folder = f"step-{step}", open_folder(self.folder)
        path = folder.locate(name)
        reach("checkpoint")
        writer = None if self.writer is None else self.writer(path)
        with naming_full_disk(path):
            try:
                dcp.save(
                    _collect(trainable, _place(trainable, group)),
                    checkpoint_id=None if writer else path,
                    storage_writer=writer,
                    process_group=group.process_group,
                )
            except dcp.api.CheckpointException as error:
                raise CommError(
                    f"rank {group.rank}: the checkpoint of step {step} failed: {error}"
                ) from error
        barrier(group)
        reach("commit")
        if group.rank == 0:
            folder.write(f"{name}/{_MARK}", f"{step}\n")
            kept = sorted(self._committed())[-self.keep :]
            for old in _steps(folder.names()):
                if old < step and old not in kept:  # or it was cut off
                    folder.remove(f"step-{old}")
        barrier(group)

    def load(self, group: Group, trainable: Trainable, step: int) -> None:
        """Reads a checkpoint; all ranks call it.

        Raises:
            CommError: a rank was lost.
        """
        self.read(trainable, _place(trainable, group), step, group)

    def read(self, trainable: Fillable, place: int, step: int, group: Group | None = None) -> None:
        """Reads the state of one replica set, which stays as it was until all is read.

        Args:
            trainable: that is filled.
            place: of the set in `Trainable.replica_sets`.
            step: of the checkpoint.
            group: whose ranks read together; None: this one reads alone.

        Raises:
            CommError: the checkpoint cannot be read, or a rank was lost.
            DataError: it lacks a parameter.
        """
        import torch.distributed.checkpoint as dcp

        name, folder = f"step-{step}", open_folder(self.folder)
        path = folder.locate(name)
        last = len(trainable.versions()) - 1
        reader = folder.reader(name) if self.reader is None else self.reader(path)
        try:
            saved = reader.read_metadata().state_dict_metadata
            wanted = [trainable.allocate(entry) for entry in range(last)]
            _expect_all([next(iter(places)) for places in wanted], saved, path)
            # A parameter that has had no gradient has no state in it.
            places = [
                {name: one for name, one in entry.items() if name in saved} for entry in wanted
            ]
            state: dict[str, Any] = {name: one for entry in places for name, one in entry.items()}
            state[f"rest{place}"] = rest = _PackedBytes()
            dcp.load(
                state,
                storage_reader=reader,
                process_group=None if group is None else group.process_group,
                no_dist=group is None,
            )
        except (dcp.api.CheckpointException, OSError, EOFError) as error:
            raise CommError(f"reading {path} failed: {error}") from error
        reach("load")
        for entry, tensors in enumerate(places):
            trainable.fill(entry, tensors, step)
        assert rest.tensor is not None, "DCP has loaded it"
        trainable.fill(last, {"rest": rest.tensor}, step)

    def _committed(self) -> list[int]:
        return _steps(open_folder(self.folder).names(_MARK))


def _steps(names: Iterable[str]) -> list[int]:
    """Steps of the checkpoints among what is in a folder, which may have the user's files too."""
    numbers = [name.removeprefix("step-") for name in names if name.startswith("step-")]
    return [int(number) for number in numbers if number.isdecimal()]


class _PackedBytes:
    """A tensor of unknown size, which DCP stores whole as an object with a state."""

    def __init__(self, tensor: Tensor | None = None) -> None:
        self.tensor = tensor

    def state_dict(self) -> dict[str, Any]:
        """The bytes, as an object: DCP would want to know a tensor's size before it reads it."""
        return {"bytes": None if self.tensor is None else self.tensor.numpy().tobytes()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes the bytes."""
        self.tensor = torch.frombuffer(bytearray(state["bytes"]), dtype=torch.uint8)


def _expect_all(names: Sequence[str], saved: Collection[str], path: str) -> None:
    missing = [name for name in names if name not in saved]
    if missing:
        raise DataError(
            f"{path}: expected all {len(names)} parameters of the model, got a checkpoint without "
            f"{', '.join(missing[:3])}{', ...' if missing[3:] else ''}; train the model that it was "
            f"written for, or begin in another folder"
        )


def _place(trainable: Trainable, group: Group) -> int:
    sets = trainable.replica_sets(group.world_size)
    return next(place for place, ranks in enumerate(sets) if group.rank in ranks)


def _collect(trainable: Trainable, place: int) -> dict[str, Any]:
    last = len(trainable.versions()) - 1
    state: dict[str, Any] = {
        name: one for entry in range(last) for name, one in trainable.state_of(entry).items()
    }
    return {**state, f"rest{place}": _PackedBytes(trainable.state_of(last)["rest"])}
