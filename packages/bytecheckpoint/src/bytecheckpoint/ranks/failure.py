"""Raises one rank's failure on every rank as the same exception.

Errors are sent between ranks as class name, errno and message. A class other than ours and those of
OSError becomes a RankFailure.
"""

from __future__ import annotations

import errno
import re

import msgspec

from shared.errors import (
    CommError,
    ConfigError,
    DataError,
    DiskFullError,
    RankFailure,
    TopologyError,
)

__all__ = ["Failure"]

_KINDS: dict[str, type[Exception]] = {
    kind.__name__: kind
    for kind in (CommError, ConfigError, DataError, DiskFullError, TopologyError)
}


# An OSError raised without errno gets one, from which Python makes the subclass on another rank.
_NUMBERS = {FileNotFoundError: errno.ENOENT, FileExistsError: errno.EEXIST}


class Failure(msgspec.Struct, frozen=True):
    """An exception on one rank.

    Attributes:
        rank: the rank that failed.
        kind: class name of the exception.
        errno: error number of an OSError, None without one.
        text: message of the exception.
    """

    rank: int
    kind: str
    errno: int | None
    text: str

    @classmethod
    def of(cls, error: BaseException, rank: int) -> Failure:
        """Describes an exception."""
        if isinstance(error, OSError) and error.errno == errno.ENOSPC and error.filename:
            error = DiskFullError.at(error.filename)
        is_os_error = isinstance(error, OSError) and not isinstance(error, (*_KINDS.values(),))
        kind = "OSError" if is_os_error else type(error).__name__
        text = str(error) or type(error).__name__
        if kind not in _KINDS and not is_os_error:
            text = f"{kind}: {text}"
        if not isinstance(error, OSError) or not is_os_error:
            return cls(rank, kind, None, text)
        if error.errno is not None:
            # Without the number, because the new exception's message contains it again.
            text = f"{error.strerror}: {error.filename!r}" if error.filename else error.strerror
        return cls(rank, kind, error.errno or _NUMBERS.get(type(error)), text)

    def exception(self, world_size: int) -> Exception:
        """The exception to raise, on any rank."""
        text = self.text
        # An error told before, as a failed save's at the next one, names its rank.
        if world_size > 1 and not re.search(rf"\brank \d+ of {world_size}: ", text):
            text = f"rank {self.rank} of {world_size}: {text}"
        if self.kind in _KINDS:
            return _KINDS[self.kind](text)
        if self.kind == "OSError":
            # With a number Python makes it the matching subclass, as FileNotFoundError.
            return OSError(self.errno, text) if self.errno is not None else OSError(text)
        return RankFailure(text, rank=self.rank)
