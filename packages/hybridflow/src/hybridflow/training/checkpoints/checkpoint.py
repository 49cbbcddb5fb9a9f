"""Checkpoints of a run: the state of its worker groups and of its loop.

Each group's ranks write their own parts into a folder of the group's name, in the format of
torch.distributed.checkpoint, which can be loaded into any other layout (see
`hybridflow.roles.state.sharded_state`). A checkpoint is renamed to its final name once all ranks
are done, so that an incomplete one is never found. The sizes of all files are recorded and compared
before loading; for checksums of their contents pass a storage that computes them.
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
from shared.errors import ConfigError, DataError, DiskFullError, RankFailure
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
        """Names the folder of checkpoints; writes nothing yet.

        Args:
            folder: folder that the controller and all ranks see.
            keep: number of newest checkpoints to keep; None keeps all.
            storage_writer: function from a path to a storage writer of
                torch.distributed.checkpoint. Ranks call it, so it must be picklable, such as a
                class.
            storage_reader: likewise, to a storage reader for the writer's files.

        Raises:
            ConfigError: if `keep` is below 1.
        """
        if keep is not None and keep < 1:
            raise ConfigError(f"keep: expected at least 1, or None to keep all, got {keep}")
        self.folder, self.keep = Path(folder).absolute(), keep
        self._writer_of, self._reader_of = storage_writer, storage_reader

    @property
    def steps(self) -> list[int]:
        """Steps of all complete checkpoints, ascending."""
        return sorted(self._paths())

    def latest(self) -> int | None:
        """The step of the newest checkpoint; None if there is none."""
        return max(self.steps, default=None)

    def save(self, step: int, groups: Mapping[str, WorkerGroup], extra: Mapping[str, Any]) -> Path:
        """Writes a checkpoint, and removes the oldest if there are more than `keep`.

        Args:
            step: number of the checkpoint; replaces a checkpoint of the same step.
            groups: worker groups, by the names to load them by.
            extra: JSON values, batches and tensors, nested in any way. Loading returns it as JSON
                does: tuples as lists, keys as text.

        Returns:
            The checkpoint's folder.

        Raises:
            ConfigError: if step or a name cannot be part of a file name.
            DataError: if `extra` holds other values, or cannot be written.
            DiskFullError: if the disk has no room for it.
            RankFailure: if a rank cannot write. Earlier checkpoints are unchanged in any case.
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
        except DiskFullError:
            raise
        except OSError as error:
            raise DataError(
                f"{path} cannot be written: {error}; save elsewhere, earlier checkpoints are unchanged"
            ) from error
        self._remove_oldest(step)
        return path

    def load(self, groups: Mapping[str, WorkerGroup], step: int | None = None) -> dict[str, Any]:
        """Loads a checkpoint into worker groups, whose layouts may differ from the saved ones.

        Load only folders that you trust: torch's storage unpickles their metadata.

        Args:
            groups: by the names that they were saved by; other groups are not read.
            step: of the checkpoint; the newest when None.

        Returns:
            The value of `extra`.

        Raises:
            DataError: if there is no such checkpoint, it lacks a group, or a file has another
                size; raised before anything is loaded.
            RankFailure: if a group's state is of another model (its weights stay unchanged), or a
                file's contents cannot be read.
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
                "%s: steps %s, of a run that resumed from before step %d, are newer than what was "
                "saved now, and latest() is one of them; remove them or save elsewhere",
                self.folder, later, step,
            )  # fmt: skip
        if self.keep is not None:
            for old in steps[: len(steps) - len(later)][: -self.keep]:
                remove_folder(self._path(old))


def _answered(calls: Iterable[Future]) -> None:
    """Waits for all calls, even if one fails, so that no rank is still busy with its own."""
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
            f"{path / _INDEX} cannot be read: {type(error).__name__}: {error}; load an earlier "
            f"checkpoint"
        ) from error
    for name, size in sizes:
        file = path / name
        found = f"{file.stat().st_size} bytes" if file.is_file() else "no file"
        if found != f"{size} bytes":
            raise DataError(f"{file}: expected {size} bytes, got {found}; load an earlier one")
    return index
