"""Compile kernels to machine code with numba, keeping the result on disk where that is possible."""

import logging
from collections.abc import Callable
from typing import Any

from numba import njit
from numba.core import event

__all__ = ["compile_s", "compiled", "inlined"]

log = logging.getLogger(__name__)

_timer = event.TimingListener()
event.register("numba:compile", _timer)


def compile_s() -> float:
    """Seconds that numba has compiled in this process; loading machine code from disk is not counted.

    A kernel is compiled by its first call, so a clock around that call has to subtract them.
    """
    return _timer.duration if _timer.done else 0.0


def compiled(function: Callable[..., Any], relaxed: frozenset[str] = frozenset()) -> Any:
    """`function` as a serial kernel that releases the interpreter lock.

    Machine code is cached beside the source or, where that folder is read-only, in the user's
    cache folder. Where neither can be written, numba refuses to cache at all: then every process
    compiles for itself, and a log line says so.

    The cache knows a function by its own file only: after editing a function that another file
    calls (`philox/cpu.py`), remove the `__pycache__` beside the caller too.

    numba's `fastmath` is off but for the rules of rounding in `relaxed`: the bits of a result are part
    of a kernel's definition.
    """
    options: Any = {"nogil": True, "error_model": "numpy", "fastmath": set(relaxed) or False}
    try:
        return njit(cache=True, **options)(function)
    except RuntimeError as error:
        log.info("no machine-code cache for %s: %s", function.__qualname__, error)
        return njit(**options)(function)


def inlined(function: Callable[..., Any]) -> Any:
    """`function` as a part of kernels, copied into each that calls it.

    A call between kernels counts references to arrays, atomically, and hides loops from each other:
    too much for a piece of work of some hundred nanoseconds.
    """
    return njit(inline="always", error_model="numpy")(function)
