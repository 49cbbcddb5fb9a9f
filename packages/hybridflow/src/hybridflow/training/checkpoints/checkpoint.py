"""Checkpoints of a run: the state of its worker groups, and what its loop has to remember.

Each group's ranks write their own parts into a folder of the group's name, in the format of
torch.distributed.checkpoint, which is read into any other layout as well; `hybridflow.roles.state.sharded_state`
says how. A checkpoint gets its name when all ranks are done, so that one that was cut short is never
seen. Sizes of all files are kept and compared before anything is loaded; for checksums of their
contents pass storage that has some.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter

from hybridflow.roles.state.sharded_state import ReaderOf, WriterOf
from hybridflow.training.checkpoints import loop_state
from hybridflow.workers.future import Future
from hybridflow.workers.worker_group import WorkerGroup
from shared.errors import ConfigError, DataError, RankFailure
from shared.files import atomic_folder, find_folders, recover_folders, remove_folder

__all__ = ["Checkpoint"]

_log = logging.getLogger(__name__)

_FORMAT = 1
_STEPS, _INDEX, _EXTRA = "step-*", "checkpoint.json", "extra.pt"


class Checkpoint:
    """A folder of checkpoints, the newest few of which are kept.

    Example:
        >>> checkpoint = Checkpoint("runs/sort")  # doctest: +SKIP
        >>> checkpoint.save(10, {"actor": actor}, {"next_step": 11})  # doctest: +SKIP
        >>> checkpoint.load({"actor": actor})  # doctest: +SKIP
        {'next_step': 11}
    """

    def __init__(
        self,
        folder: str | PathLike[str],
        keep: int | None = 2,
        *,
        storage_writer: WriterOf = FileSystemWriter,
        storage_reader: ReaderOf = FileSystemReader,
    ) -> None:
        """Describes where checkpoints are; nothing is written yet.

        Args:
            folder: that controller and ranks all see.
            keep: how many; None: all.
            storage_writer: makes a storage writer of torch.distributed.checkpoint for a path. Ranks
                call it, so it must be something that can be pickled, such as a class.
            storage_reader: likewise, of what the writer wrote.

        Raises:
            ConfigError: if none is to be kept.
        """
        if keep is not None and keep < 1:
            raise ConfigError(f"keep: expected at least 1, or None to keep all, got {keep}")
        self.folder, self.keep = Path(folder).absolute(), keep
        self._writer_of, self._reader_of = storage_writer, storage_reader

    @property
    def steps(self) -> list[int]:
        """Of all checkpoints that are whole, ascending."""
        return sorted(self._paths())

    def latest(self) -> int | None:
        """The step of the newest checkpoint; None if there is none."""
        return max(self.steps, default=None)

    def save(self, step: int, groups: Mapping[str, WorkerGroup], extra: Mapping[str, Any]) -> Path:
        """Writes a checkpoint, and removes the oldest beyond those that are kept.

        Args:
            step: its number; a checkpoint of the same number is replaced.
            groups: worker groups by the names that they are loaded by.
            extra: what JSON knows, with batches and tensors anywhere in it. It comes back as JSON
                has it: tuples as lists, keys as text.

        Returns:
            The checkpoint's folder.

        Raises:
            ConfigError: if step or a name can not be part of a file name.
            DataError: if `extra` holds something else, or can not be written.
            RankFailure: if a rank can not write. Earlier checkpoints are as they were.
        """
        bad = [name for name in groups if not re.fullmatch(r"\w[\w.-]*", name)]
        if step < 0 or bad:
            raise ConfigError(
                f"expected a step of 0 or more and names of letters, digits, '.', '_' and '-', got "
                f"step {step} and names {bad or list(groups)}"
            )
        tree, tensors = loop_state.pack(extra)
        path = self._path(step)
        try:
            recover_folders(self.folder, _STEPS)
            with atomic_folder(path) as partial:
                calls = (
                    group.call("save_state", name, str(partial / name), self._writer_of)
                    for name, group in groups.items()
                )
                _answered(calls)
                (partial / _EXTRA).write_bytes(tensors)
                sizes = {
                    str(file.relative_to(partial)): file.stat().st_size
                    for file in sorted(partial.rglob("*"))
                    if file.is_file()
                }
                head = {"format": _FORMAT, "step": step, "groups": list(groups), "files": sizes}
                (partial / _INDEX).write_text(json.dumps(head | {"extra": tree}))
        except OSError as error:
            raise DataError(
                f"{path} can not be written: {error}; free space there or save elsewhere, earlier "
                f"checkpoints are as they were"
            ) from error
        self._remove_oldest(step)
        return path

    def load(self, groups: Mapping[str, WorkerGroup], step: int | None = None) -> dict[str, Any]:
        """Reads a checkpoint into worker groups, of the same layouts as were saved or of others.

        Only folders that you trust: torch's own storage unpickles their metadata.

        Args:
            groups: by the names that they were saved by; others in the checkpoint are not read.
            step: of the checkpoint; the newest when None.

        Returns:
            What `extra` was.

        Raises:
            DataError: if there is no such checkpoint, it lacks a group, or a file is damaged;
                before anything is loaded.
            RankFailure: if it is of another model, before its group is touched, or a file's
                contents can not be read.
        """
        paths = self._paths()
        path = paths.get(max(paths, default=0) if step is None else step)
        if path is None:
            wanted = "a checkpoint" if step is None else self._path(step).name
            raise DataError(
                f"{self.folder}: expected {wanted}, got {sorted(paths) or 'none'}; check the "
                f"folder, or start without loading"
            )
        index = _index(path)
        missing = [name for name in groups if name not in index["groups"]]
        if missing:
            raise DataError(
                f"{path}: expected the groups {list(groups)}, got {index['groups']}; load those "
                f"that are there, and leave {missing} out"
            )
        calls = (
            group.call("load_state", name, str(path / name), self._reader_of)
            for name, group in groups.items()
        )
        _answered(calls)
        return loop_state.unpack(index["extra"], path / _EXTRA)

    def _path(self, step: int) -> Path:
        return self.folder / f"step-{step:06d}"

    def _paths(self) -> dict[int, Path]:
        found = find_folders(self.folder, _STEPS).items()
        matches = ((re.fullmatch(r"step-(\d+)", name), path) for name, path in found)
        return {int(match[1]): path for match, path in matches if match}

    def _remove_oldest(self, step: int) -> None:
        steps = self.steps
        later = [other for other in steps if other > step]
        if later:
            _log.warning(
                "%s: steps %s, of a run that went on from before step %d, are newer than what was "
                "saved now, and latest() is one of them; remove them or save elsewhere",
                self.folder, later, step,
            )  # fmt: skip
        if self.keep is not None:
            for old in steps[: len(steps) - len(later)][: -self.keep]:
                remove_folder(self._path(old))


def _answered(calls: Iterable[Future]) -> None:
    """Waits for all, made before any is waited for, so that no rank is still at it if one failed."""
    failures = []
    for future in list(calls):
        try:
            future.result()
        except RankFailure as error:
            failures.append(error)
    if failures:
        raise failures[0]


def _index(path: Path) -> dict[str, Any]:
    try:
        index = json.loads((path / _INDEX).read_text())
        if index["format"] != _FORMAT:
            raise DataError(
                f"{path / _INDEX}: expected format {_FORMAT}, got {index['format']}; load it with "
                f"the version of hybridflow that wrote it"
            )
        sizes = index["files"].items()
    except (OSError, ValueError, KeyError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(
            f"{path / _INDEX} can not be read: {type(error).__name__}: {error}; load an earlier "
            f"checkpoint"
        ) from error
    for name, size in sizes:
        file = path / name
        found = f"{file.stat().st_size} bytes" if file.is_file() else "no file"
        if found != f"{size} bytes":
            raise DataError(f"{file}: expected {size} bytes, got {found}; load an earlier one")
    return index
