"""Power loss, simulated: every state of the disk that a save's system calls permit.

`recording` watches the calls of local storage that change a folder. `losses` replays them and cuts
the power after each: what was synced is there; of the rest, any part may be. Names and bytes are
apart: a name may survive without its file's bytes, bytes without a name, a write in some of its
sectors only. File systems promise more than that, each something else; a save that stands this
stands them all.
"""

import hashlib
import itertools
import os
import random
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from bytecheckpoint.storage import local

SECTOR_BYTES = 512
_NUM_RANDOM = 6
# Nodes of folders are negative, nodes of files positive.
_ROOT = -1


class Killed(BaseException):
    """The process was killed here; it does nothing more."""


class Op(NamedTuple):
    """A call that changed the disk, or something that the user was told.

    Attributes:
        kind: "name", "write", "sync" or "report".
        node: the file or folder it is about.
        site: for a sync, the lines of the package that led to it, and what was synced.
        names: for a folder, entries set by one atomic call: the node of each, None if removed.
        offset: for a write, where in the file.
        data: the written bytes.
        fact: what was reported.
    """

    kind: str
    node: int = 0
    site: str = ""
    names: tuple[tuple[str, int | None], ...] = ()
    offset: int = 0
    data: bytes = b""
    fact: Any = None


class Record:
    """Stands in for the module `os`: does as told, but does not sync, and writes it down."""

    def __init__(self, disk: Path) -> None:
        self.disk = os.fspath(disk)
        self.log: list[Op] = []
        self._kill_before: Callable[[str, str], bool] | None = None
        self._is_dead = False
        self._numbers = itertools.count(2)
        self._nodes = {self.disk: _ROOT}
        self._paths: dict[int, str] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def report(self, fact: Any) -> None:
        """From here on the user may rely on the fact."""
        self.log.append(Op("report", fact=fact))

    @contextmanager
    def killed(self, before: Callable[[str, str], bool]) -> Iterator[None]:
        """Kills the process that runs inside, before a call of this name about this path."""
        self._kill_before = before
        try:
            yield
            raise AssertionError("the call to be killed at never came")
        except Killed:
            pass
        finally:
            self._kill_before, self._is_dead = None, False

    def open(self, path: str, flags: int, mode: int = 0o777) -> int:
        self._enter("open", path)
        assert not flags & os.O_TRUNC, "not modelled"
        is_new = not os.path.lexists(path)
        descriptor = os.open(path, flags, mode)
        if is_new:
            self._nodes[path] = next(self._numbers)
            self._set_names(path, (path, self._nodes[path]))
        self._paths[descriptor] = path
        return descriptor

    def close(self, descriptor: int) -> None:
        self._paths.pop(descriptor, None)
        os.close(descriptor)

    def pwrite(self, descriptor: int, data: memoryview, offset: int) -> int:
        path = self._paths[descriptor]
        self._enter("pwrite", path)
        count = os.pwrite(descriptor, data, offset)
        self.log.append(Op("write", self._nodes[path], offset=offset, data=bytes(data[:count])))
        return count

    def fsync(self, descriptor: int) -> None:
        path = self._paths[descriptor]
        self._enter("fsync", path)
        if path in self._nodes:  # others are folders above the disk
            self.log.append(Op("sync", self._nodes[path], self._site(path)))

    def mkdir(self, path: str) -> None:
        self._enter("mkdir", path)
        os.mkdir(path)
        self._nodes[path] = -next(self._numbers)
        self._set_names(path, (path, self._nodes[path]))

    def rmdir(self, path: str) -> None:
        self._enter("rmdir", path)
        os.rmdir(path)
        self._set_names(path, (path, None))

    def unlink(self, path: str) -> None:
        self._enter("unlink", path)
        os.unlink(path)
        self._set_names(path, (path, None))

    def link(self, source: str, target: str) -> None:
        self._enter("link", target)
        os.link(source, target)
        self._nodes[target] = self._nodes[source]
        self._set_names(target, (target, self._nodes[target]))

    def replace(self, source: str, target: str) -> None:
        self._enter("replace", target)
        assert os.path.dirname(source) == os.path.dirname(target), "not modelled"
        os.replace(source, target)
        self._nodes[target] = self._nodes[source]
        self._set_names(target, (source, None), (target, self._nodes[target]))

    def _enter(self, call: str, path: str) -> None:
        kill = self._kill_before
        self._is_dead = self._is_dead or (kill is not None and kill(call, path))
        if self._is_dead:
            raise Killed(f"{call} {path}")

    def _set_names(self, path: str, *names: tuple[str, int | None]) -> None:
        folder = self._nodes[os.path.dirname(path)]
        entries = tuple((os.path.basename(entry), node) for entry, node in names)
        self.log.append(Op("name", folder, names=entries))

    def _site(self, path: str) -> str:
        lines, frame = [], sys._getframe(2)
        while frame is not None:
            source = Path(frame.f_code.co_filename)
            if source.is_relative_to(_PACKAGE):
                lines.append(f"{source.stem}.{frame.f_code.co_name}:{frame.f_lineno}")
            frame = frame.f_back
        name = re.sub(r"[0-9a-f]{12}|\d+", "*", os.path.relpath(path, self.disk))
        return f"{name}: {' < '.join(lines)}"


_PACKAGE = Path(local.__file__).parents[1]


@contextmanager
def recording(disk: Path) -> Iterator[Record]:
    """Records what local storage of this process does; call it with an empty folder."""
    record = Record(disk)
    setattr(local, "os", record)  # noqa: B010 - a module's attribute of another type
    try:
        yield record
    finally:
        setattr(local, "os", os)  # noqa: B010


def sites(log: list[Op]) -> set[str]:
    """Every way by which the package came to sync something."""
    return {op.site for op in log if op.kind == "sync"}


def without(log: list[Op], site: str) -> list[Op]:
    """What a package that lacks one sync would have done."""
    return [op for op in log if op.site != site]


def violation(log: list[Op], check: Callable[[Path, list[Any]], str | None]) -> str | None:
    """Looks for a power loss that breaks a promise.

    Args:
        log: a record's.
        check: is given what is left of the disk and the facts reported before the loss; says what
            is wrong, None if nothing is.
        folder: where the remains are laid out.

    Returns:
        What was wrong first and when, None if no loss does harm.
    """
    memory = "/dev/shm" if os.path.isdir("/dev/shm") else None
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        for number, (done, facts, files) in enumerate(losses(log)):
            remains = Path(folder, str(number))
            remains.mkdir()
            for path, data in files.items():
                if data is None:
                    (remains / path).mkdir()
                else:
                    (remains / path).write_bytes(data)
            wrong = check(remains, facts)
            shutil.rmtree(remains)
            if wrong:
                return f"power lost after operation {done} of {len(log)}: {wrong}"
    return None


def losses(log: list[Op]) -> Iterator[tuple[int, list[Any], dict[str, bytes | None]]]:
    """States after a loss at any time, each once for the same facts.

    Yields:
        The number of operations before it, the facts reported before it, and what is left: bytes of
        files and None for folders, each after the folder it is in.
    """
    draw = random.Random(0)
    disk = _Disk()
    facts: list[Any] = []
    seen: set[bytes] = set()
    for done, op in enumerate(log, start=1):
        if op.kind == "report":
            facts.append(op.fact)
            seen.clear()
        disk.do(op)
        for choice in disk.choices(draw):
            files = disk.files(choice, draw)
            digest = hashlib.sha256(repr(sorted(files.items())).encode()).digest()
            if digest not in seen:
                seen.add(digest)
                yield done, list(facts), files


# The share of an operation that reached the disk, by its position among those not synced.
_Choice = Callable[[int, Op], float]


@dataclass
class _Node:
    """A file's bytes or a folder's entries: what was synced, and what came since."""

    data: bytes = b""
    names: dict[str, int] = field(default_factory=dict)
    pending: list[Op] = field(default_factory=list)


class _Disk:
    def __init__(self) -> None:
        self._nodes = {_ROOT: _Node()}

    def do(self, op: Op) -> None:
        if op.kind == "sync":
            node = self._nodes[op.node]
            for pending in node.pending:
                _apply(node, pending)
            node.pending = []
        elif op.kind != "report":
            for _, number in op.names:
                if number is not None:
                    self._nodes.setdefault(number, _Node())
            self._nodes[op.node].pending.append(op)

    def choices(self, draw: random.Random) -> Iterator[_Choice]:
        """All and nothing, each operation alone and each alone missing or torn, and random ones."""
        pending = [op for node in self._nodes.values() for op in node.pending]
        yield lambda at, op: 1
        yield lambda at, op: 0
        yield lambda at, op: op.kind == "name"
        yield lambda at, op: op.kind == "write"
        for chosen, op in enumerate(pending):
            yield lambda at, op, chosen=chosen: at == chosen
            yield lambda at, op, chosen=chosen: at != chosen
            if op.kind == "write":
                yield lambda at, op, chosen=chosen: 0.5 if at == chosen else 1
        for _ in range(_NUM_RANDOM):
            shares = [draw.choice([0, 0.5, 1]) for _ in pending]
            yield lambda at, op, shares=shares: shares[at]

    def files(self, choice: _Choice, draw: random.Random) -> dict[str, bytes | None]:
        """What can be seen when the power is back."""
        left: dict[int, _Node] = {}
        at = 0
        for number, node in self._nodes.items():
            left[number] = _Node(node.data, dict(node.names))
            for op in node.pending:
                share = choice(at, op)
                at += 1
                if op.kind == "name" and share < 1:
                    share = share > draw.random()
                if share:
                    _apply(left[number], op, lambda share=share: draw.random() < share)
        found: dict[str, bytes | None] = {}
        folders = [("", _ROOT)]
        while folders:
            folder, number = folders.pop()
            for name, inner in left[number].names.items():
                found[folder + name] = None if inner < 0 else left[inner].data
                if inner < 0:
                    folders.append((f"{folder}{name}/", inner))
        return found


def _apply(node: _Node, op: Op, is_written: Callable[[], bool] = lambda: True) -> None:
    """Does an operation; of a write, sectors that are not written read as zeros."""
    if op.kind == "name":
        for name, number in op.names:
            node.names.pop(name, None)
            if number is not None:
                node.names[name] = number
        return
    pieces = [op.data[at : at + SECTOR_BYTES] for at in range(0, len(op.data), SECTOR_BYTES)]
    data = b"".join(piece if is_written() else bytes(len(piece)) for piece in pieces)
    before = node.data[: op.offset].ljust(op.offset, b"\0")
    node.data = before + data + node.data[op.offset + len(data) :]
