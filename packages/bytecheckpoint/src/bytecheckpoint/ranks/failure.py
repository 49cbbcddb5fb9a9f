"""One rank's failure raised on every rank as the same exception.

Errors travel between ranks as kind, number and text. A kind that is not ours or the operating
system's arrives as a RankFailure.
"""

from __future__ import annotations

import errno

import msgspec

from shared.errors import CommError, ConfigError, DataError, RankFailure, TopologyError

__all__ = ["Failure"]

_KINDS: dict[str, type[Exception]] = {
    kind.__name__: kind for kind in (CommError, ConfigError, DataError, TopologyError)
}


# Raised by hand they have no number, and the number is what makes the kind on another rank.
_NUMBERS = {FileNotFoundError: errno.ENOENT, FileExistsError: errno.EEXIST}


class Failure(msgspec.Struct, frozen=True):
    """What went wrong on a rank.

    Attributes:
        rank: where.
        kind: class of the exception.
        errno: the operating system's number, None where it gave none.
        text: the message.
    """

    rank: int
    kind: str
    errno: int | None
    text: str

    @classmethod
    def of(cls, error: BaseException, rank: int) -> Failure:
        """Describes an exception."""
        is_os_error = isinstance(error, OSError) and not isinstance(error, (*_KINDS.values(),))
        kind = "OSError" if is_os_error else type(error).__name__
        text = str(error) or type(error).__name__
        if kind not in _KINDS and not is_os_error:
            text = f"{kind}: {text}"
        if not isinstance(error, OSError) or not is_os_error:
            return cls(rank, kind, None, text)
        if error.errno is not None:
            # Without the number, which the exception made of this says again.
            text = f"{error.strerror}: {error.filename!r}" if error.filename else error.strerror
        return cls(rank, kind, error.errno or _NUMBERS.get(type(error)), text)

    def exception(self, world_size: int) -> Exception:
        """The exception to raise, on any rank."""
        text = self.text if world_size == 1 else f"rank {self.rank} of {world_size}: {self.text}"
        if self.kind in _KINDS:
            return _KINDS[self.kind](text)
        if self.kind == "OSError":
            # With a number Python makes it the matching subclass, as FileNotFoundError.
            return OSError(self.errno, text) if self.errno is not None else OSError(text)
        return RankFailure(text, rank=self.rank)
