"""A file of answers: one run writes it at a time, and the next one resumes with what it lacks."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from types import TracebackType
from typing import Any

from shared.errors import DataError
from shared.files import naming_full_disk

__all__ = ["AnswerFile", "Request", "digest_tree", "find_unanswered"]

_LOG = logging.getLogger(__name__)
_BEGINNING = b'{"id": '
"""How every line of a file of answers begins."""


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt to answer.

    Attributes:
        id: names it in the file of answers.
        number: among all prompts, which decides its draws.
        token_ids: the prompt.
    """

    id: str
    number: int
    token_ids: tuple[int, ...]

    @property
    def prompt_hash(self) -> str:
        """16 hexadecimal digits of the token ids, by which an answer names its prompt."""
        return digest_tree(self.token_ids)


def digest_tree(tree: Any) -> str:
    """16 hexadecimal digits of what can be written as JSON."""
    return sha256(json.dumps(tree).encode()).hexdigest()[:16]


class AnswerFile:
    """A file of answers, locked while it is entered.

    The kernel frees the lock when the process ends, however it ends. Entering twice in one process is
    fine. A file that nothing was written to is removed at the end.
    """

    def __init__(self, path: str | Path) -> None:
        """Takes the path; nothing is opened yet."""
        self.path = Path(path)
        self._file: Any = None
        self._num_entered = 0

    def __enter__(self) -> AnswerFile:
        """Opens the file and locks it.

        Raises:
            DataError: it cannot be written, or another run writes it.
        """
        self._num_entered += 1
        if self._num_entered > 1:
            return self
        try:
            self._file = self._open()
        except BaseException:
            self._num_entered = 0
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._num_entered -= 1
        if self._num_entered:
            return
        with self._file, suppress(OSError):
            if self.path.is_file() and not self.path.stat().st_size:
                self.path.unlink()

    def write(
        self,
        wave: Sequence[Request],
        answers: Sequence[Sequence[int]],
        settings: str,
        decode: Callable[[list[int]], str] | None,
    ) -> None:
        """Appends the answers of a wave and syncs the file.

        Args:
            wave: the prompts.
            answers: token ids of each answer.
            settings: digits that the answers were made under.
            decode: text of token ids.
        """
        lines = []
        for request, token_ids in zip(wave, answers, strict=True):
            record: dict[str, Any] = {
                "id": request.id, "prompt_hash": request.prompt_hash, "settings": settings,
                "token_ids": list(token_ids),
            }  # fmt: skip
            if decode is not None:
                record["answer"] = decode(list(token_ids))
            lines.append(json.dumps(record, ensure_ascii=False) + "\n")
        with naming_full_disk(self.path):
            rest = memoryview("".join(lines).encode())
            while rest:  # a disk that fills up takes a part
                rest = rest[self._file.write(rest) :]
            with suppress(OSError):  # a pipe or a device has no disk
                os.fsync(self._file.fileno())

    def _open(self) -> Any:
        path = self.path
        while True:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                # Without a buffer: what is written and not synced is not written again at the end.
                file = open(path, "ab", buffering=0)  # noqa: SIM115 - closed in __exit__
            except OSError as error:
                if error.errno in (errno.ENOSPC, errno.EDQUOT):
                    raise
                what = "a folder" if path.is_dir() else repr(error.strerror)
                raise DataError(
                    f"--out {path}: expected a file that answers can be written to, got {what}; name "
                    f"another file"
                ) from error
            if not path.is_file():
                return file
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                file.close()
                raise DataError(
                    f"--out {path}: expected a file that no other run writes, but one does at this "
                    f"moment; wait for its end, or give another --out"
                ) from error
            except OSError as error:
                _LOG.warning(
                    "%s: this file system has no locks (%s); start no second run on it", path, error
                )
                return file
            # The run that held the lock may have removed the file just now.
            with suppress(FileNotFoundError):
                if os.fstat(file.fileno()).st_ino == path.stat().st_ino:
                    return file
            file.close()


def find_unanswered(
    requests: Sequence[Request], path: str | Path, settings: str | None = None
) -> list[Request]:
    """Prompts that a file of answers lacks; an unfinished last line is cut off.

    Args:
        requests: all prompts.
        path: the file of answers; it need not exist.
        settings: digits that answers were made under; None for any.

    Raises:
        DataError: a line is no answer, answers another prompt under the id of one of these, or was
            made under other settings.
    """
    path = Path(path)
    if not path.is_file():
        return list(requests)
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    hash_of = {}
    for number, line in enumerate(whole.split(b"\n")[:-1], 1):
        try:
            found = json.loads(line.decode())
            hash_of[str(found["id"])] = found["prompt_hash"]
            made_under = found["settings"]
            found["token_ids"]
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(
                f'{path}:{number}: expected an answer with "id", "prompt_hash", "settings" and '
                f'"token_ids", got {line[:80]!r}; give another --out'
            ) from error
        if settings not in (None, made_under):
            raise DataError(
                f"{path}:{number}: expected answers of this model's weights, under this plan's widths and "
                f"these settings of sampling and length, got one made under others; give another --out"
            )
    for one in requests:
        if hash_of.get(one.id, one.prompt_hash) != one.prompt_hash:
            raise DataError(
                f"{path}: expected answers to these prompts, got one to another prompt of id "
                f"{one.id!r}; give another --out"
            )
    rest = data[len(whole) :]
    if rest[: len(_BEGINNING)] != _BEGINNING[: len(rest)]:
        raise DataError(
            f"{path}: expected answers, got a last line {rest[:80]!r}; give another --out"
        )
    if rest:  # the process was killed while it wrote
        with open(path, "r+b") as file:
            file.truncate(len(whole))
    return [one for one in requests if one.id not in hash_of]
