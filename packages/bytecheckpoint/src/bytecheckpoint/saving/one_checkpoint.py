"""Saves one checkpoint at a path, without a run around it."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

from bytecheckpoint.loading.source import split_url
from bytecheckpoint.saving.saver import TIMEOUT, Saver
from bytecheckpoint.storage import open_storage
from bytecheckpoint.storage.files.manifest import MANIFEST_NAME
from shared.comms import ProcessGroup

__all__ = ["save"]


def save(
    path: str | os.PathLike[str],
    state: dict[str, Any],
    *,
    overwrite: bool = False,
    timeout: timedelta = TIMEOUT,
    process_group: ProcessGroup | None = None,
    verify_replicas: bool | None = None,
) -> None:
    """Saves one checkpoint and returns when it exists; called by all ranks.

    Args:
        path: path of its folder, or a URL that fsspec opens.
        state: see `Checkpointer.save`.
        overwrite: replace an existing checkpoint, atomically once the new one is complete.
        timeout: how long to wait for the slowest rank.
        process_group: the ranks that save together; None: all of the world.
        verify_replicas: see `Checkpointer`.

    Raises:
        FileExistsError: there is a checkpoint.
        DataError: the state cannot be saved.
        OSError: the storage refused; all ranks raise.
    """
    root, name = split_url(os.fspath(path))
    storage = open_storage(root)

    def check() -> None:
        if saver.team.is_coordinator and not overwrite and MANIFEST_NAME in storage.list(name):
            raise FileExistsError(
                f"{path}: expected no checkpoint, but there is one; choose another path, or pass "
                f"overwrite=True to replace it"
            )

    saver = Saver(
        storage, timeout=timeout, process_group=process_group, verify_replicas=verify_replicas
    )
    handle = saver.save(name, state, overwrite=overwrite, check=check)
    saver.finish()
    handle.committed.result()
