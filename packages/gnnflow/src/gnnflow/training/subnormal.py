"""Flushing of subnormal floats to zero, since processors compute with them ten times slower.

Attention weights of distant neighbours become subnormal.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["flush_subnormals"]


@contextmanager
def flush_subnormals() -> Iterator[None]:
    """Flushes subnormal floats to zero in this thread, where supported; also a decorator."""
    was_so = float(torch.full((), 1e-310, dtype=torch.float64) * 1) == 0
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(was_so)
