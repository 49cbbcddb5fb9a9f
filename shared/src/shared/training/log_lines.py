"""Log lines on stderr: of a command with `-v`, and of the ranks that it starts.

Nothing heavy is imported here, as a rank reads this before it imports torch.
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

__all__ = ["list_shown", "show_log_lines"]

_shown: tuple[str, ...] = ()


def list_shown() -> tuple[str, ...]:
    """The names of the loggers whose lines are shown; a pool gives them to its ranks."""
    return _shown


@contextmanager
def show_log_lines(names: Sequence[str], prefix: str = "") -> Iterator[None]:
    """Prints log lines from INFO on to stderr within the block.

    Args:
        names: the loggers, as names of packages; none: nothing changes.
        prefix: what each line begins with.
    """
    global _shown
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter(f"{prefix}%(name)s: %(message)s"))
    loggers = [logging.getLogger(name) for name in names]
    before, levels = _shown, [logger.level for logger in loggers]
    _shown = (*before, *names)
    for logger in loggers:
        logger.setLevel(logging.INFO)
        logger.addHandler(handler)
    try:
        yield
    finally:
        _shown = before
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
            logger.removeHandler(handler)
