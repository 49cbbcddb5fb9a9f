"""Where every package's program starts, so that Ctrl-C ends it in one line from its first imports on.

An interrupt in the middle of an import may be swallowed or become another error, so while the
command line is imported a handler ends the process; nothing has been begun by then. From
`run_command` on, a command says itself how it is resumed.
"""

import os
import signal
import sys
from contextlib import suppress
from importlib import import_module
from types import FrameType

__all__ = ["run_program"]

_INTERRUPTED = 130


def run_program(package: str) -> int:
    """Imports `cli` of a package and runs its `main`.

    Args:
        package: name of the module.

    Returns:
        The exit status, for `sys.exit`; 130 after Ctrl-C.
    """
    before = signal.getsignal(signal.SIGINT)

    def end(number: int, frame: FrameType | None) -> None:
        _tell(package)
        os._exit(_INTERRUPTED)

    with suppress(ValueError):  # a thread has no say in signals
        # One who ignores interrupts, as nohup does, goes on doing so.
        if before is signal.default_int_handler:
            signal.signal(signal.SIGINT, end)
    try:
        main = import_module(f"{package}.cli").main
    finally:
        if signal.getsignal(signal.SIGINT) is end:
            signal.signal(signal.SIGINT, before)
    try:
        return main()
    except KeyboardInterrupt:  # while arguments are parsed
        _tell(package)
        return _INTERRUPTED


def _tell(package: str) -> None:
    """Writes the line, past Python's buffers, which the interrupted code may hold locked."""
    if os.environ.get("RANK", "0") == "0":  # of torchrun's ranks one tells it
        name = os.path.basename(sys.argv[0])
        prog = package if name == "__main__.py" else name
        os.write(2, f"{prog}: interrupted; start again by the same command\n".encode())
