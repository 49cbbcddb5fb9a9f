"""What a user sees of a long job: progress on stderr, and metrics over steps in TensorBoard.

Progress is a bar on a terminal and a line every ten seconds elsewhere. A job reports how far it is
through `JobProgress`; what is shown does not concern it. rich, which draws the bar, and tensorboard,
an optional distribution, are imported only where they are needed.
"""

import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any

from shared.errors import ConfigError
from shared.units import format_bytes, format_s

__all__ = ["JobProgress", "ScalarWriter", "hidden_progress", "is_progress_hidden", "show_progress"]

LINE_EVERY_S = 10.0
_hidden = False


class JobProgress:
    """How far a job is.

    Attributes:
        text: what is being done, shown before the count; free to change.
        done: units of work that are done.
        total: units of work in all; None if unknown.
        is_bytes: whether the units are bytes.
    """

    def __init__(self, text: str, total: int | None = None, *, is_bytes: bool = False) -> None:
        self.text, self.total, self.is_bytes = text, total, is_bytes
        self.done = 0
        self.on_change: Callable[[], object] = lambda: None

    def advance(self, count: int = 1, text: str | None = None) -> None:
        """Adds to what is done, and replaces the text if one is given."""
        self.reach(self.done + count, text)

    def reach(self, done: int, text: str | None = None) -> None:
        """Sets what is done, and replaces the text if one is given."""
        self.done = done
        self.update(self.text if text is None else text)

    def update(self, text: str) -> None:
        """Replaces the text."""
        self.text = text
        self.on_change()

    def describe(self) -> str:
        """The text and the count, as one line."""
        count = format_bytes if self.is_bytes else "{:,}".format
        if self.total is None:
            return f"{self.text}, {count(self.done)} done" if self.done else self.text
        share = f" ({self.done / self.total:.0%})" if self.total else ""
        return f"{self.text}: {count(self.done)} of {count(self.total)}{share}"


@contextmanager
def show_progress(
    text: str, total: int | None = None, *, is_bytes: bool = False, is_shown: bool = True
) -> Iterator[JobProgress]:
    """Shows a job's progress on stderr within the block.

    On a terminal it is a bar, or a spinner without a total. Elsewhere it is a line every ten seconds,
    and one at the end if there was one before; a job of less than ten seconds prints nothing.

    Args:
        text: what is being done.
        total: units of work in all; None if unknown.
        is_bytes: whether the units are bytes.
        is_shown: False shows nothing, as ranks other than the first should.

    Yields:
        What the job tells its progress to.
    """
    progress = JobProgress(text, total, is_bytes=is_bytes)
    if not is_shown or _hidden:
        yield progress
    elif sys.stderr.isatty():
        with _bar(progress):
            yield progress
    else:
        with _lines(progress, LINE_EVERY_S):
            yield progress


@contextmanager
def hidden_progress(is_hidden: bool = True) -> Iterator[None]:
    """Has `show_progress` show nothing in this process within the block, if `is_hidden`."""
    global _hidden
    before, _hidden = _hidden, _hidden or is_hidden
    try:
        yield
    finally:
        _hidden = before


def is_progress_hidden() -> bool:
    """Whether `hidden_progress` is in force, for ranks in processes of their own to be told."""
    return _hidden


@contextmanager
def _bar(progress: JobProgress) -> Iterator[None]:
    from rich import progress as rich
    from rich.console import Console

    columns: list[rich.ProgressColumn] = [
        rich.SpinnerColumn(),
        rich.TextColumn("{task.description}"),
    ]
    if progress.total is not None:
        count = rich.DownloadColumn() if progress.is_bytes else rich.MofNCompleteColumn()
        columns = [columns[1], rich.BarColumn(), count, rich.TimeRemainingColumn()]
    with rich.Progress(
        *columns, console=Console(stderr=True), transient=progress.total is None
    ) as display:
        task = display.add_task(progress.text, total=progress.total)
        progress.on_change = lambda: display.update(
            task, description=progress.text, completed=progress.done
        )
        yield


@contextmanager
def _lines(progress: JobProgress, every_s: float) -> Iterator[None]:
    begun = time.monotonic()
    is_over, has_told = threading.Event(), threading.Event()

    def tell() -> None:
        elapsed = format_s(time.monotonic() - begun)
        sys.stderr.write(f"{progress.describe()}, {elapsed}\n")
        sys.stderr.flush()

    def repeat() -> None:
        # A thread, as a single step may take minutes.
        while not is_over.wait(every_s):
            tell()
            has_told.set()

    thread = threading.Thread(target=repeat, name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
    if has_told.is_set():
        tell()


class ScalarWriter(AbstractContextManager["ScalarWriter"]):
    """Writes scalars over steps to a folder that `tensorboard --logdir` shows.

    A run that resumes writes to the same folder: what an earlier process wrote from the first step
    written here on is no longer shown.

    Args:
        folder: folder, made when missing; None writes nothing.

    Raises:
        ConfigError: tensorboard is not installed.
    """

    def __init__(self, folder: Path | None) -> None:
        if folder is not None and find_spec("tensorboard") is None:
            raise ConfigError(
                f"tensorboard: expected the package tensorboard, to write {folder}, but it is not "
                "installed; do `pip install tensorboard`"
            )
        self._folder, self._writer = folder, None

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Writes values of one step; names with a slash are shown in groups ("seconds/wait")."""
        if self._folder is None:
            return
        if self._writer is None:
            self._writer: Any = self._open(self._folder, step)
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, step)

    @staticmethod
    def _open(folder: Path, step: int) -> Any:
        from torch.utils.tensorboard import SummaryWriter

        return SummaryWriter(str(folder), purge_step=step)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._writer is not None:
            self._writer.close()
