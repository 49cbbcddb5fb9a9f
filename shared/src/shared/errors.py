"""Exceptions that Meshyard raises for users.

Each message says what was expected, what was got (value, rank, file or key) and what to do next.
Invariants of the code itself are asserted instead.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

__all__ = [
    "CommError",
    "ConfigError",
    "DataError",
    "DiskFullError",
    "DivergenceError",
    "MeshyardError",
    "RankFailure",
    "TopologyError",
    "describe_mistake",
    "list_causes",
]


class MeshyardError(Exception):
    """Base class of all of Meshyard's exceptions."""


class ConfigError(MeshyardError, ValueError):
    """A setting is outside its range or contradicts another; the message gives its path."""


class TopologyError(MeshyardError, ValueError):
    """A cluster, mesh or partition is malformed or does not match its use."""


class DataError(MeshyardError, ValueError):
    """Input data cannot be used as given: wrong shape, range, type or file content."""


class DivergenceError(DataError):
    """The loss of a training run is NaN or infinite."""


class DiskFullError(MeshyardError, OSError):
    """A disk has no room for what is being written; the message has the path and the bytes free."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.errno = errno.ENOSPC

    @classmethod
    def at(cls, path: str | os.PathLike[str]) -> DiskFullError:
        """The error of a file or folder that could not be written, whether it exists or not."""
        folder = Path(path).absolute()
        while not folder.exists():
            folder = folder.parent
        disk = os.statvfs(folder)
        return cls(
            f"{os.fspath(path)}: expected room on the disk for what is written there, got "
            f"{disk.f_bavail * disk.f_frsize:,} bytes free; free some, or write to another disk"
        )


class CommError(MeshyardError, RuntimeError):
    """A message between ranks was not delivered, or does not match what was announced."""


class RankFailure(MeshyardError, RuntimeError):
    """A rank raised, died or ran out of time; the message carries the rank's own traceback.

    Attributes:
        rank: the rank that is the cause; None if none is known.
        mistake: what a user has to mend, as `describe_mistake` gives it; None for anything else.
    """

    def __init__(self, message: str, rank: int | None = None, mistake: str | None = None) -> None:
        super().__init__(message)
        self.rank, self.mistake = rank, mistake


def describe_mistake(error: BaseException) -> str | None:
    """One sentence on an error that a user can mend, which a traceback would only hide.

    Such are Meshyard's own errors, those of the operating system (a missing file, a full disk) and a
    lack of memory. A lost peer or message is not: what led to it is found by the tracebacks.

    Returns:
        The sentence; None for any other error.
    """
    if isinstance(error, RankFailure):
        return error.mistake
    if isinstance(error, OSError) and error.errno == errno.ENOSPC and error.filename:
        error = DiskFullError.at(error.filename)
    if isinstance(error, MeshyardError | OSError | MemoryError) and not isinstance(
        error, CommError
    ):
        return str(error) or type(error).__name__
    return None


def list_causes(error: BaseException) -> list[BaseException]:
    """An error, and those that led to it or were being handled when it came up, newest first."""
    chain: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and not any(cause is one for one in chain):
        chain.append(cause)
        cause = cause.__cause__ or cause.__context__
    return chain
